"""`trimtab simulate`: what a model would take on GPUs that nobody has to have: a plan as usual, and the best one."""
