"""Feeds a model ids of which only those inside images are image placeholders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def replace_sampled_placeholders(
    model: Any, token_ids_BT: torch.Tensor, token_types_BT: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Ids to feed, within the context, so that the model takes only the ids inside images for image placeholders.

    Models find placeholders by value in the whole batch, but a policy may sample that value as an ordinary id. Such an
    id is replaced by another one, and gets its own embedding by a hook. `token_types_BT` is 1 inside images.

    The embeddings run once for any ids: sharded ones are gathered by all processes each time that they run.
    """
    features = torch.unique(token_ids_BT[token_types_BT == 1])
    stray_BT = torch.isin(token_ids_BT, features) & (token_types_BT == 0)
    if not stray_BT.any():
        yield token_ids_BT
        return
    other = next(i for i in range(len(features) + 1) if i not in features.tolist())

    def feed(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (token_ids_BT, *arguments[1:]), {name: value for name, value in named.items() if name != "input"}

    hook = model.get_input_embeddings().register_forward_pre_hook(feed, with_kwargs=True)
    try:
        yield token_ids_BT.masked_fill(stray_BT, other)
    finally:
        hook.remove()
