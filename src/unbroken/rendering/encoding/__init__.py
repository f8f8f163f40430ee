"""Text to token ids without forgery (I5), and back."""
