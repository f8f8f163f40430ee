"""Rollouts of unchanged agents: programs that get a base URL and a key (docs/gateway.md)."""
