"""From trajectories to rows or pairs, their weights, and the loss that is minimised."""
