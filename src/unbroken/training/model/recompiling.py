"""How many variants of one function `torch.compile` may make."""

from __future__ import annotations

import inspect
from typing import Any

import torch


def limit_variants(number: int) -> dict[str, Any]:
    """Options of `torch.compile` for up to `number` variants, such as for other masks or numbers of lanes.

    torch's own limit is 8, after which it runs the code as it is, with a warning. Before torch 2.13 it cannot be set
    for one function, and nothing is returned.
    """
    is_known = "recompile_limit" in inspect.signature(torch.compile).parameters
    return {"recompile_limit": number} if is_known else {}
