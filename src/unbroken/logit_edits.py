"""Changes logits as `LogitControls` say: one function for the engine that samples and the trainer that follows it.

The order is vLLM's (`v1/sample/sampler.py`): impossible ids, bias, repetition, frequency, presence. Temperature and
cuts come later, by the caller.

Shapes: N tokens, whose logits are changed; V vocabulary; G of these tokens that follow one history.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from unbroken.types import ControlSpan, LogitControls, TokenIds

_NONE = -1


@dataclass(frozen=True, slots=True)
class _History:
    """A completion, the ids before it, and what it was sampled under."""

    token_ids: NDArray[np.int64]
    start: int
    """Where the completion begins."""
    controls: LogitControls


_Group: TypeAlias = tuple[torch.Tensor, _History, NDArray[np.int64]]
"""The rows of the tokens that follow one history, the history, and their places, which rise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEdits:
    """What changes the logits of N tokens, each at a place of its history; everything is worked out by `apply`."""

    histories: tuple[_History, ...]
    numbers_N: NDArray[np.int64]
    """The history of each token; -1 for none, whose logits stay."""
    places_N: NDArray[np.int64]
    """How many ids stand before each token in its history."""

    @staticmethod
    def of(rows: Iterable[tuple[TokenIds, tuple[ControlSpan, ...], NDArray[np.int64]]]) -> LogitEdits | None:
        """Those of the tokens at `places` of each row, one row after the other: (token_ids, controls, places).

        A place is the position of the id that is predicted; None if none of them is in a span.
        """
        histories: list[_History] = []
        numbers, all_places = [], []
        for token_ids, spans, places in rows:
            own = np.full(len(places), _NONE, dtype=np.int64)
            for span in spans:
                inside = (span.start <= places) & (places < span.stop)
                if inside.any():
                    own[inside] = len(histories)
                    histories.append(_History(token_ids.astype(np.int64), span.start, span.controls))
            numbers.append(own)
            all_places.append(places.astype(np.int64))
        if not histories:
            return None
        return LogitEdits(
            histories=tuple(histories), numbers_N=np.concatenate(numbers), places_N=np.concatenate(all_places)
        )

    def find_keys(self) -> NDArray[np.int64]:
        """[N] equal numbers for tokens that are changed in the same way if the ids before them are the same."""
        known: dict[tuple[int, LogitControls], int] = {}
        keys = [known.setdefault((each.start, each.controls), len(known)) for each in self.histories]
        return np.array([*keys, _NONE], dtype=np.int64)[self.numbers_N]

    def pick(self, chosen: NDArray[np.int64] | NDArray[np.bool_]) -> LogitEdits:
        """Those of the tokens where a mask [N] is true, or of these tokens, in their order."""
        return LogitEdits(histories=self.histories, numbers_N=self.numbers_N[chosen], places_N=self.places_N[chosen])

    def apply(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Return the changed logits; impossible ids have -inf. A gradient flows through it."""
        groups = list(self._groups(logits_NV.device))
        edited_NV = _add_bias(logits_NV, groups)
        changed: list[tuple[torch.Tensor, torch.Tensor]] = []
        for rows, history, places in groups:
            factor, controls = history.controls.repetition_penalty, history.controls
            if factor == 1 and not controls.presence_penalty and not controls.frequency_penalty:
                continue
            own_GV = edited_NV[rows]
            if factor != 1:
                own_GV = own_GV * _find_scales(own_GV, history, places)
            if controls.presence_penalty or controls.frequency_penalty:
                counts_GV = _count(history.token_ids, history.start, places, like=own_GV)
                own_GV = own_GV - controls.frequency_penalty * counts_GV
                own_GV = own_GV - controls.presence_penalty * (counts_GV > 0).to(own_GV.dtype)
            changed.append((rows, own_GV))
        edited_NV = _put(edited_NV, changed)
        impossible_NV = _find_impossible(logits_NV, groups)
        return edited_NV if impossible_NV is None else edited_NV.masked_fill(impossible_NV, float("-inf"))

    def pull_back(self, gradient_NV: torch.Tensor, logits_NV: torch.Tensor) -> torch.Tensor:
        """The gradient for `logits_NV`, from that for `apply(logits_NV)`: only the repetition penalty scales them."""
        if all(each.controls.repetition_penalty == 1 for each in self.histories):
            return gradient_NV
        groups = list(self._groups(logits_NV.device))
        biased_NV = _add_bias(logits_NV, groups)
        scaled = [
            (rows, gradient_NV[rows] * _find_scales(biased_NV[rows], history, places))
            for rows, history, places in groups
            if history.controls.repetition_penalty != 1
        ]
        return _put(gradient_NV, scaled)

    def _groups(self, device: torch.device) -> Iterator[_Group]:
        """The tokens of each history, in the order of their places: their rows, the history, their places."""
        for number in np.unique(self.numbers_N[self.numbers_N != _NONE]).tolist():
            rows = np.flatnonzero(self.numbers_N == number)
            rows = rows[np.argsort(self.places_N[rows], kind="stable")]
            yield torch.from_numpy(rows).to(device), self.histories[number], self.places_N[rows]


def _add_bias(logits_NV: torch.Tensor, groups: Sequence[_Group]) -> torch.Tensor:
    tokens, ids, values = [], [], []
    for rows, history, _ in groups:
        if bias := history.controls.logit_bias:
            tokens.append(rows.repeat_interleave(len(bias)))
            ids.append(torch.tensor([token_id for token_id, _ in bias]).repeat(len(rows)))
            values.append(torch.tensor([value for _, value in bias], dtype=logits_NV.dtype).repeat(len(rows)))
    if not tokens:
        return logits_NV
    where = torch.cat(tokens), torch.cat(ids).to(logits_NV.device)
    return logits_NV.index_put(where, torch.cat(values).to(logits_NV.device), accumulate=True)


def _find_impossible(logits_NV: torch.Tensor, groups: Sequence[_Group]) -> torch.Tensor | None:
    """[N, V] the ids that cannot be sampled; None if all can."""
    impossible_NV: torch.Tensor | None = None
    for rows, history, places in groups:
        controls = history.controls
        if not controls.forbids:
            continue
        if impossible_NV is None:
            impossible_NV = torch.zeros(logits_NV.shape, dtype=torch.bool, device=logits_NV.device)
        if controls.allowed_token_ids:
            is_other_V = torch.ones_like(impossible_NV[0])
            is_other_V[list(controls.allowed_token_ids)] = False
            impossible_NV[rows] = is_other_V
        for banned_G, token_id in _find_bans(history, places):
            if banned_G.any():
                impossible_NV[rows[torch.from_numpy(banned_G).to(rows.device)], token_id] = True
    return impossible_NV


def _put(values_NV: torch.Tensor, changed: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The values with others in some rows, each of which is changed once. All at once: a copy of the whole for each
    history would take a decoding engine, with one history a row, the square of its rows.
    """
    if not changed:
        return values_NV
    rows, own = (torch.cat(each) for each in zip(*changed, strict=True))
    return values_NV.index_copy(0, rows, own)


def _find_scales(biased_GV: torch.Tensor, history: _History, places: NDArray[np.int64]) -> torch.Tensor:
    """[G, V] what the repetition penalty multiplies logits with. VLLM multiplies with the reciprocal too, in this
    precision: a quotient would have other bits.
    """
    factor = torch.tensor(history.controls.repetition_penalty, dtype=biased_GV.dtype, device=biased_GV.device)
    seen_GV = _count(history.token_ids, 0, places, like=biased_GV) > 0
    scales_GV = torch.where(biased_GV > 0, 1.0 / factor, factor)
    return torch.where(seen_GV, scales_GV, torch.ones_like(scales_GV))


def _count(token_ids: NDArray[np.int64], start: int, places: NDArray[np.int64], *, like: torch.Tensor) -> torch.Tensor:
    """[G, V] how often each id stands in [start, place) of a history, for places that rise.

    An id is counted at the first place behind it, and then at all later ones by a sum.
    """
    before = np.arange(start, places[-1])
    first = torch.from_numpy(np.searchsorted(places, before, side="right")).to(like.device)
    ids = torch.from_numpy(token_ids[before]).to(like.device)
    counts_GV = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    ones = torch.ones(len(before), dtype=like.dtype, device=like.device)
    return counts_GV.index_put_((first, ids), ones, accumulate=True).cumsum(0)


def _find_bans(history: _History, places: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.bool_], int]]:
    """At which places an id is impossible, [G], for stop ids and the last ids of bad words."""
    early_G = places - history.start < history.controls.min_tokens
    yield from ((early_G, token_id) for token_id in history.controls.stop_token_ids)
    for word in history.controls.bad_words_ids:
        yield _find_after(word[:-1], history, places), word[-1]


def _find_after(prefix: tuple[int, ...], history: _History, places: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[G] whether the completion's ids before a place end with these; a prompt's do not count."""
    starts = places - len(prefix)
    found: NDArray[np.bool_] = starts >= history.start
    for offset, token_id in enumerate(prefix):
        found[found] = history.token_ids[starts[found] + offset] == token_id
    return found
