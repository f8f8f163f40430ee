"""The ids of a path as plain JSON: what each is, where it comes from, and what it was sampled with."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unbroken.ledger.nodes import Path
from unbroken.rendering.base import TEMPLATE
from unbroken.types import NO_VERSION


def describe_path(path: Path) -> dict[str, Any]:
    """The keys of a row that say which ids there are, and where each comes from."""
    indices, versions = path.message_indices, path.policy_versions
    return {
        "token_ids": path.token_ids.tolist(),
        "segments": [
            {"start": each.start, "stop": each.stop, "origin": each.origin.value, "node": each.node}
            for each in path.segments
        ],
        "message_indices": find_runs(indices, where=indices != TEMPLATE),
        "rollout_logprobs": to_floats(path.rollout_logprobs[path.sampled_mask]),
        "policy_versions": find_runs(versions, where=versions != NO_VERSION),
    }


def cut_path(path: Path, end: int) -> Path:
    """The first `end` ids of a path, without its images and experts."""
    return Path(
        token_ids=path.token_ids[:end],
        sampled_mask=path.sampled_mask[:end],
        rollout_logprobs=path.rollout_logprobs[:end],
        policy_versions=path.policy_versions[:end],
        message_indices=path.message_indices[:end],
        segments=tuple(replace(each, stop=min(each.stop, end)) for each in path.segments if each.start < end),
        images=(),
        temperatures=path.temperatures,
    )


def find_runs(values: NDArray[Any], *, where: NDArray[np.bool_]) -> list[list[Any]]:
    """[start, stop, value] of neighbours that are equal, where a mask is true."""
    if len(values) == 0:
        return []
    changes = (values[1:] != values[:-1]) | (where[1:] != where[:-1])
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(values)]
    pairs = itertools.pairwise(bounds)
    return [[start, stop, _plain(values[start])] for start, stop in pairs if where[start]]


def to_floats(values: NDArray[np.float32]) -> list[float]:
    """The shortest numbers that are the same in float32."""
    return [float(text) for text in values.astype(np.float32).astype(str)]


def _plain(value: Any) -> Any:
    return float(str(value)) if isinstance(value, np.floating) else value.item()
