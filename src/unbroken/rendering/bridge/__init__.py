"""The bridge between two turns: glue found and checked on the conversation itself, and its ids."""
