"""What an admin does with a node: install, ask what is wrong, see what a job would get, recover."""
