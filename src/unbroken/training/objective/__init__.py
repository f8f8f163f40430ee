"""What is minimised: from trajectories to rows or pairs, their weights, and their loss."""
