"""Environments of NeMo Gym: resources servers with tools and a verifier (docs/environments.md)."""

from unbroken.integrations.nemo_gym.env import NeMoGymEnv

__all__ = ["NeMoGymEnv"]
