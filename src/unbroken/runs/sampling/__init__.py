"""What samples the groups of a run: in the trainer's process, or in one of its own."""
