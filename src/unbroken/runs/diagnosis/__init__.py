"""What is wrong with a run, and what to do: from metrics, rollouts and its ending (docs/troubleshooting.md)."""
