"""The report after a job: profile -> Summary (pure) -> terminal, JSON, or one HTML page."""
