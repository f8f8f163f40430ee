"""`unbroken train`: recipes, their settings, and the run itself (`reinforce`)."""
