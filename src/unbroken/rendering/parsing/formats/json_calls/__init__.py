"""Formats with calls as JSON, alone or in a list."""
