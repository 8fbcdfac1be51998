"""What a search leaves for a training script."""
