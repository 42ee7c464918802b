"""What a plan takes on given hardware: time by simulation, memory in closed form."""
