"""Environments behind a server of OpenEnv (docs/environments.md)."""

from unbroken.integrations.openenv.env import OpenEnv, OpenEnvTools

__all__ = ["OpenEnv", "OpenEnvTools"]
