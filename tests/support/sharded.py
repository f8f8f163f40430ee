"""Models that several processes share, each with its part."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import torch

from unbroken.training.config import ParallelConfig
from unbroken.training.model.sharding import make_distributed_config

WHOLE = ParallelConfig()


def shared(model: Any, parallel: ParallelConfig) -> Any:
    """This process's part of `model`, as `from_pretrained` loads it; the model itself, if each process has it whole."""
    if not parallel.is_sharded:
        return model
    folder = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder)
    model.save_pretrained(folder[0])  # the first process alone writes
    torch.distributed.barrier()
    config = make_distributed_config(parallel, is_bfloat16=False)
    part = type(model).from_pretrained(folder[0], dtype=torch.float32, distributed_config=config)
    torch.distributed.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)
    return part
