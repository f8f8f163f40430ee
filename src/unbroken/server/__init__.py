"""The server: an engine and a renderer behind the dialects that trainers and agents already speak."""
