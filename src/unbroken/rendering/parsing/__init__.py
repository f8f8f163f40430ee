"""Reads completions as reasoning, content and tool calls, in the call format of the model."""
