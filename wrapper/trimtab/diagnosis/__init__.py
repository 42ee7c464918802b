"""Diagnosing a recorded job: reads a trace or a profile, asks `balance.diagnose`, and says the answer."""
