"""An engine in each process of a recipe samples with the weights that are trained, or the run does not start."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from unbroken.errors import InvalidInputError
from unbroken.runs.config import EngineKind
from unbroken.runs.run import check_model_copies


def accelerator(**plugin: bool) -> SimpleNamespace:
    """What `check_model_copies` asks of an accelerator."""
    return SimpleNamespace(state=SimpleNamespace(fsdp_plugin=SimpleNamespace(**plugin) if plugin else None))


def test_an_engine_is_not_copied_from_weights_that_only_one_process_loads():
    check_model_copies(EngineKind.EMBEDDED, accelerator())
    check_model_copies(EngineKind.EMBEDDED, accelerator(cpu_ram_efficient_loading=False))
    check_model_copies(EngineKind.SERVER, accelerator(cpu_ram_efficient_loading=True))
    with pytest.raises(InvalidInputError, match="--fsdp_cpu_ram_efficient_loading false"):
        check_model_copies(EngineKind.EMBEDDED, accelerator(cpu_ram_efficient_loading=True))
