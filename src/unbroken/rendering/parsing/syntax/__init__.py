"""How calls are spelled, for the formats that share a spelling: JSON, Python, tags."""
