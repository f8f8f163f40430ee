"""Stands in for verifiers 0.4: the part of its interface that we use, with tasksets whose agent asks once."""

__version__ = "0.4.0"
