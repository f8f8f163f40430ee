"""The Tinker API: a user's own loop over our engine and trainer (docs/tinker.md)."""
