"""Imports what training and serving processes need, without a thread: `support.forks` has it done once."""

from __future__ import annotations

import accelerate  # noqa: F401
import peft  # noqa: F401
import torch
import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen3.modeling_qwen3
import transformers.trainer  # noqa: F401

import unbroken.engines.http
import unbroken.engines.transformers
import unbroken.runs.recipe
import unbroken.runs.run
import unbroken.server.process
import unbroken.weights.disk  # noqa: F401

torch.set_num_threads(1)
