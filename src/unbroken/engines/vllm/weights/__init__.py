"""New weights for vLLM's workers, whatever they come from."""
