"""Which engines take new weights in place, and which by vLLM's layerwise reload."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn


def make_model(method: Any) -> Any:
    """A model of one layer with this quantisation method."""
    layer = nn.Linear(2, 2)
    layer.quant_method = method
    return nn.Sequential(layer)


@pytest.mark.parametrize(
    ("device", "quantization", "lora", "quantised_layer", "in_place"),
    [
        ("cuda", None, None, False, True),
        ("cpu", None, None, False, False),
        ("cuda", "fp8", None, False, False),
        ("cuda", "fp8", None, True, False),
        ("cuda", None, None, True, False),
        ("cuda", None, object(), False, False),
    ],
)
def test_only_layers_that_keep_the_checkpoints_form_are_written_in_place(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    quantization: str | None,
    lora: Any,
    quantised_layer: bool,
    in_place: bool,
) -> None:
    """A quantised weight in use is not what a checkpoint has: a copy into it would be taken for quantised values."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.platforms import current_platform

    from unbroken.engines.vllm.workers import is_loaded_in_place

    class Quantised(UnquantizedLinearMethod):
        """Packs or quantises what it has loaded."""

    method = object.__new__(Quantised if quantised_layer else UnquantizedLinearMethod)
    config = SimpleNamespace(lora_config=lora, model_config=SimpleNamespace(quantization=quantization))
    model = make_model(method)
    assert not is_loaded_in_place(model, config)  # on a CPU; vLLM's modules are imported for it
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: device == "cuda")
    assert is_loaded_in_place(model, config) is in_place
