"""The config of an embedded engine; it loads no torch, so that a run's config is checked first."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from unbroken.errors import InvalidInputError
from unbroken.types import Numerics


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersEngineConfig:
    """Limits of an embedded engine, whose memory for keys and values grows on demand up to them."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "max_batch": "it is 256 rows, whose keys and values take memory as they grow: context_length bounds them",
        "max_prefill_tokens": "it is 4,096, of which a pass takes the memory of a pass of the trainer",
        "records_routing": "trainer.routing_replay turns it on",
        "numerics": "they are those of trainer.numerics",
    }
    """Fields that are no settings of a run, and why."""

    max_batch: int = 256
    """Maximum rows that sample at once (a request has n), and slots of the prefix cache; more rows wait."""
    context_length: int | None = None
    """Maximum ids of a sequence; None is the model's own `max_position_embeddings`. Lower it where a long context of
    which rollouts use a part does not fit into memory."""
    max_prefill_tokens: int = 4096
    """Maximum prompt ids, padding included, that one step computes besides sampling."""
    records_routing: bool = False
    """Record the experts that compute each id, for requests with `return_routed_experts`: L * K bytes for each id that
    a slot holds. Only for a model whose routers can be found (`unbroken.routing`)."""
    numerics: Numerics = Numerics.FAST
    """With exact, logprobs have the bits of any other pass over the same row with exact numerics."""

    def __post_init__(self) -> None:
        for name in ("max_batch", "context_length", "max_prefill_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInputError(f"{name} must be >= 1, got {value}")


def parse_words(words: Sequence[str]) -> argparse.Namespace:
    """Parse the options of `unbroken serve --engine transformers`; ends the command for one that is wrong."""
    parser = argparse.ArgumentParser(prog="unbroken serve --engine transformers", add_help=False, allow_abbrev=False)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device")
    parser.add_argument("--max-batch", type=int, default=TransformersEngineConfig().max_batch)
    parser.add_argument("--context-length", "--max-model-len", type=int)
    parser.add_argument("--enable-return-routed-experts", action="store_true")
    parser.add_argument("--numerics", choices=[Numerics.FAST, Numerics.EXACT], default=Numerics.FAST)
    return parser.parse_args(list(words))
