"""Which layers each stage should hold."""
