"""Reads calls in the notations that formats share: JSON, Python, tags."""
