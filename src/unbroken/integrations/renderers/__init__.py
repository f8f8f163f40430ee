"""Renderers of the PyPI package `renderers`."""
