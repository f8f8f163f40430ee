"""One small module per format that models write reasoning and tool calls in."""
