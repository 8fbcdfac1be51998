"""The Optuna study that a search keeps, for any number of workers."""
