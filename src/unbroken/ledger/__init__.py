"""The record of a rollout: a tree of given and sampled token ids, and its export as training rows."""
