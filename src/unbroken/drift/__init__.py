"""`unbroken drift`: what retokenising would have changed in a model's own conversations."""
