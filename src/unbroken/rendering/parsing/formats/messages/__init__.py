"""Formats in which a turn is one or several messages, each with a header that says what it is."""
