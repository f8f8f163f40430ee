"""What is wrong with a run, and what to do: from its metrics, some rollouts and how it ended (docs/troubleshooting.md)."""
