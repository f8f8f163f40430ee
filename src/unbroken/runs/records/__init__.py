"""A sample of a run's rollouts: as files for viewers (docs/rollouts.md), and as a table of completions."""
