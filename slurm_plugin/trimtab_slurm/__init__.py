"""The Slurm side: hooks, devices, sampler, the profile format, the Slurm client."""
