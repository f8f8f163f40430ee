"""`unbroken train`: recipes, their configs, and what their runs have in common."""
