"""Chat templates: which one, compiled and run in a sandbox."""
