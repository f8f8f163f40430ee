"""The built-in recipe: a data set of prompts, and reward functions from a Python file."""
