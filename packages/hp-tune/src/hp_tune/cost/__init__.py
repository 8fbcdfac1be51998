"""What a configuration costs: time and memory."""
