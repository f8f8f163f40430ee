"""Reading completions: one small module per format of reasoning and tool calls."""
