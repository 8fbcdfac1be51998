"""What the tuner knows of a cluster."""
