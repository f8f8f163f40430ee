"""Images on their way into prompts: files to pictures, messages to files, placeholders to spans."""
