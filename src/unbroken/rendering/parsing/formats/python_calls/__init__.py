"""Formats with calls as in Python, `add(a=1)`, or nearly so."""
