"""What the measured numbers of a pipeline mean. Pure functions: no I/O, no torch."""
