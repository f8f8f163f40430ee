"""`unbroken audit`: what a model's chat template does to multi-turn training, and what we do about it."""
