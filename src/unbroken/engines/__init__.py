"""Engines sample: one protocol, and one module or package per engine."""
