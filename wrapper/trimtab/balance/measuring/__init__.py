"""From the ranks' reports to what each part of the model costs, and how fast each place is."""
