"""The model that is trained: its logprobs, its rows in forward passes, its adapters, shards and weights."""
