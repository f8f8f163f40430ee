"""The models that come out: of a run, and of any checkpoint, as folders that transformers and vLLM load."""
