"""`unbroken audit`: checks whether a model's chat template can carry multi-turn, tool-calling training."""
