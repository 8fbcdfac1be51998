"""What the tuner knows of a model."""
