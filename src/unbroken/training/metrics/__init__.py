"""Measuring and logging."""
