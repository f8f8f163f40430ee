"""unbroken: token-in, token-out rollouts and RL training for language models.

What the sampler sampled is what the trainer trains on.
"""

__version__ = "0.1.0"
