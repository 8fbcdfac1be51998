"""From a space of configurations to the best of them."""
