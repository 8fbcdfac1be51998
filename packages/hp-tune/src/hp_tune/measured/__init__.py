"""Measured trials: a configuration run under torchrun, checked, proved active, timed."""
