"""One reader for all formats: turns sampled ids into content, reasoning and calls, as they come."""
