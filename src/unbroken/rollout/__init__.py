"""Environments, tools and the multi-turn rollout loop."""
