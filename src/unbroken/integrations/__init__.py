"""Our rollouts in other people's trainers."""
