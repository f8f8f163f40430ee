"""Rollouts of agents that nobody changed: programs that know a base URL and a key (docs/gateway.md)."""
