"""Fields and forms that several dialects share."""
