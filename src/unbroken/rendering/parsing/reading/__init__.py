"""One reader for all formats: sampled ids to content, reasoning and calls, as they come."""
