"""Anthropic's Messages: bodies to conversations, replies to content blocks."""
