"""RMS norms in one kernel in place of about eight, where a GPU computes under autocast.

transformers writes a norm as a power, a mean, a root and two products, and autograd keeps what each of them needs. A
norm is replaced only if it is  x / sqrt(mean(x^2) + eps) * weight  in float32, as a probe on a few numbers shows;
Gemma's, which adds 1 to its weight, stays. Everywhere else the model's own code runs.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm

_PROBE_ROWS = 4
_TOLERANCE = 1e-5
"""Maximum difference, relative to the largest result; both are float32."""


def fuse_norms(model: nn.Module) -> int:
    """Replace the model's RMS norms, and return how many; again is harmless."""
    found = [module for module in model.modules() if _is_plain_norm(module)]
    for module in found:
        module.forward = MethodType(_forward, module)
    return len(found)


def _forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    if not (hidden_states.is_cuda and torch.is_autocast_enabled("cuda") and self.weight.dtype == torch.float32):
        own: torch.Tensor = type(self).forward(self, hidden_states)
        return own
    return compute_norm(self, hidden_states)


def compute_norm(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """The norm in one kernel, in float32, which is what the model's own code returns for float32 weights."""
    return rms_norm(hidden_states.float(), tuple(module.weight.shape), module.weight, _get_eps(module))


def _get_eps(module: Any) -> float | None:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps if isinstance(eps, float) else None


@torch.no_grad()
def _is_plain_norm(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, nn.Parameter):
        return False
    if weight.dim() != 1 or weight.dtype != torch.float32 or _get_eps(module) is None:
        return False
    generator = torch.Generator().manual_seed(0)
    probe = 3 * torch.randn(_PROBE_ROWS, len(weight), generator=generator).to(weight.device)
    try:
        expected = type(module).forward(module, probe)
    except Exception:  # a forward with other arguments
        return False
    off = (compute_norm(module, probe) - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    return bool(off <= _TOLERANCE)
