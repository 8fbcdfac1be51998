"""Results on a terminal, or as one JSON object."""
