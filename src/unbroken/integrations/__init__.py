"""Other libraries: our rollouts in their trainers, their environments in our rollouts."""
