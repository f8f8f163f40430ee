"""Text to token ids and back: the only package that does either."""
