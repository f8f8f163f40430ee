"""Terminal tasks on this machine, without containers: sandboxes, environments, agents, verifiers."""
