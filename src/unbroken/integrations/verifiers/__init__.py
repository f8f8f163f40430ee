"""Environments of the package verifiers, each attempt in a session of a gateway (docs/environments.md)."""

from unbroken.integrations.verifiers.loading import load_environment

__all__ = ["load_environment"]
