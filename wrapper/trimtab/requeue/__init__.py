"""From one attempt of a job to the next: what is remembered, what the next one runs, and how Slurm is asked for it.

`chain` is what outlives an attempt, and `shapes`, `exclusions` and `limits` decide from it: pure, all of them. `store`
keeps it in a file, `act` asks Slurm.
"""
