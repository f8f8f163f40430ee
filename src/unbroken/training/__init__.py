"""From trajectories to updated weights; no tokenizer in here."""
