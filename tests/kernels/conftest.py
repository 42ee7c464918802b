"""Triton decides when it is imported whether it interprets, so the interpreter's tests need a process of their own."""

import os

# test_interpreter.py runs them; TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted does so by hand.
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
