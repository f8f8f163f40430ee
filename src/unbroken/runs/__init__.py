"""`unbroken train`: recipes, their settings, and the run itself (`train_model`)."""
