"""Formats with each argument of a call between tags."""
