"""What `trimtab plan` rests on and says: from a profile or a job file to a situation, from a decision to words."""
