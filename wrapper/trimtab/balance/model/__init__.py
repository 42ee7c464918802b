"""What a transformer costs on given accelerators, before anything has run."""
