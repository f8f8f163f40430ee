"""Images of requests: fetched or uploaded, kept by hash, and expanded into prompts."""
