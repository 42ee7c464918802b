"""Why steps take longer than they need."""
