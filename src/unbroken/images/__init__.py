"""Images in prompts: load them, decode them, process them for the model, and place them among the token ids."""
