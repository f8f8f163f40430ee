"""Publishers: how a trainer brings new weights to engines."""
