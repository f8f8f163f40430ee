"""What the usual pipeline makes of a conversation: decode, parse, render, tokenise again; and why its ids differ."""
