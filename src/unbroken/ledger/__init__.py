"""The record of what was given and what was sampled."""
