"""What could be done about a run, and which of it is worth doing."""
