"""The gateway: agents that nobody changed become trajectories with exact tokens (docs/gateway.md)."""
