"""Evaluations of a run: named sets of problems, some samples of each, and the numbers of them."""
