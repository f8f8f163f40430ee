"""Schedules of sampling and training on a virtual clock: the loop is the real one, its trainer and engine only wait."""
