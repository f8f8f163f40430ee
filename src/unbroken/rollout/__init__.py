"""Environments, tools and the multi-turn loop."""
