"""The srun wrapper and its command line: launch, control, balance, requeue, report, sandbox."""
