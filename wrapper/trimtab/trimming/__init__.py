"""From what balance decides while a job trains to what its ranks, or Slurm, are told to do."""
