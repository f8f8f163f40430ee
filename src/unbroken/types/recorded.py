"""What an engine records of ids beside their logprobs, so that a trainer computes the same distribution.

**Routed experts** of a mixture of experts are an array [R, L, K]: R ids, L layers (all of the model's, with zeros for
layers without experts) and K experts of an id in a layer, uint8 for at most 256 experts and uint16 for more. Experts
belong to an id as the *input* of the model, so the id that was sampled last has none. A prompt 1 2 3 and a completion
4 5:

    ids        1 2 3 4 5
    experts    a b c d        R = 4: those of 1 2 3 decided the distribution of 4, and with d that of 5

**Kept ids** are those that top-k, top-p and min-p left to sample from. They belong to an id as the *output*: each
sampled id has a set, which it is in. The completion 4 5, where 4 was sampled from 4 7 9, and nothing was cut for 5:

    token_ids    4 7 9        offsets    0 3 3        an empty set: the whole vocabulary
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from unbroken.errors import EngineError, InvariantError
from unbroken.types.arrays import TokenIds, freeze, token_ids

RoutedExperts: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""[R, L, K] the experts of each id in each layer."""
_DTYPES = (np.dtype(np.uint8), np.dtype(np.uint16))


def routed_experts(values: NDArray[Any], *, num_experts: int | None = None) -> RoutedExperts:
    """Return `values` as a read-only array.

    Raises:
        InvariantError: it is not [R, L, K] with L and K of at least 1, not uint8 or uint16, or has an expert that a
            model of `num_experts` has not.
    """
    array = np.asarray(values)
    if array.dtype.newbyteorder("=") not in _DTYPES:
        raise InvariantError(f"routed_experts must be uint8 or uint16, got dtype {array.dtype}")
    if array.ndim != 3 or 0 in array.shape[1:]:
        raise InvariantError(f"routed_experts must have the shape [ids, layers, experts per id], got {array.shape}")
    if num_experts is not None and array.size and array.max() >= num_experts:
        raise InvariantError(f"routed_experts must lie in [0, {num_experts}), got {array.max()}")
    experts: RoutedExperts = freeze(array.astype(array.dtype.newbyteorder("="), copy=False))
    return experts


def write_experts(experts: RoutedExperts | None) -> str | None:
    """Write experts as vLLM's servers do: the bytes of an `.npy` file in base64."""
    if experts is None:
        return None
    file = io.BytesIO()
    np.save(file, experts)
    return base64.b64encode(file.getvalue()).decode()


def read_experts(text: str | None) -> RoutedExperts | None:
    """Read what `write_experts` or a server of vLLM wrote. Raises `InvariantError` for anything else."""
    if text is None:
        return None
    try:
        values = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (TypeError, ValueError, EOFError, binascii.Error) as error:
        raise InvariantError(f"routed_experts must be an .npy file in base64: {error}") from None
    return routed_experts(values)


def get_expert_dtype(num_experts: int) -> np.dtype[Any]:
    """The smallest dtype that holds the experts of a model."""
    return np.dtype(np.uint8 if num_experts <= 256 else np.uint16)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptIds:
    """The sets of ids that C positions were sampled from; an empty set is the whole vocabulary."""

    token_ids: TokenIds
    """[K] the sets, one after the other."""
    offsets: NDArray[np.int64]
    """[C + 1] the set of position c is `token_ids[offsets[c] : offsets[c + 1]]`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", token_ids(self.token_ids, name="kept_ids.token_ids"))
        object.__setattr__(self, "offsets", freeze(np.asarray(self.offsets, dtype=np.int64)))
        offsets = self.offsets
        if offsets.ndim != 1 or not len(offsets) or offsets[0] != 0 or (np.diff(offsets) < 0).any():
            raise InvariantError(f"kept_ids.offsets must begin with 0 and never fall, got {offsets}")
        if offsets[-1] != len(self.token_ids):
            raise InvariantError(f"kept_ids.offsets end at {offsets[-1]} for {len(self.token_ids)} token_ids")

    @classmethod
    def of(cls, sets: Sequence[NDArray[Any] | Sequence[int]]) -> KeptIds:
        """Those of one set for each position."""
        ids = np.concatenate([np.zeros(0, np.int32), *map(token_ids, sets)])
        return cls.of_sizes(ids, np.array([len(each) for each in sets], dtype=np.int64))

    @classmethod
    def of_sizes(cls, ids: Any, sizes: NDArray[Any]) -> KeptIds:
        """Those of sets that stand one after the other, with these numbers of ids."""
        return cls(token_ids=ids, offsets=np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]))

    @classmethod
    def whole(cls, length: int) -> KeptIds:
        """Those of positions where nothing was cut."""
        return cls(token_ids=token_ids([]), offsets=np.zeros(length + 1, dtype=np.int64))

    @classmethod
    def of_top(cls, ids: NDArray[Any], logprobs: NDArray[Any], *, vocab_size: int, of: str) -> KeptIds:
        """Those of the N most likely ids at each position, [C, N], which were kept if their logprob is finite.

        Raises:
            EngineError: all N are, and a model of `vocab_size` may have kept more; `of` names the parameters.
        """
        kept = np.isfinite(logprobs)
        is_whole = kept.all(axis=1)
        if is_whole.any() and ids.shape[1] < vocab_size:
            raise EngineError(
                f"sampling.{of} kept more ids than the {ids.shape[1]} that the engine returned with return_kept_ids: "
                "set a smaller top_k, or raise the engine's --max-logprobs"
            )
        sizes = np.where(is_whole, 0, kept.sum(axis=1))
        kept[is_whole] = False
        rows, places = np.nonzero(kept)
        chosen = ids[rows, places]
        return cls.of_sizes(chosen[np.lexsort((chosen, rows))], sizes)

    @classmethod
    def join(cls, parts: Sequence[tuple[KeptIds | None, int]]) -> KeptIds | None:
        """Those of consecutive parts, each with its number of positions; None if no part has any."""
        if all(kept is None for kept, _ in parts):
            return None
        known = [cls.whole(length) if kept is None else kept for kept, length in parts]
        ids = np.concatenate([kept.token_ids for kept in known])
        return cls.of_sizes(ids, np.concatenate([kept.sizes for kept in known]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> NDArray[np.int64]:
        """[C] the number of ids in each set; 0 for the whole vocabulary."""
        return np.diff(self.offsets)

    def cut(self, stop: int) -> KeptIds:
        """Those of the first `stop` positions."""
        return KeptIds(token_ids=self.token_ids[: self.offsets[stop]], offsets=self.offsets[: stop + 1])

    def pick(self, places: NDArray[Any]) -> KeptIds:
        """Those where a mask [C] is true, or of these positions, in their order."""
        chosen = np.flatnonzero(places) if places.dtype == np.bool_ else places
        sizes = self.sizes[chosen]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        where = np.repeat(self.offsets[chosen] - offsets[:-1], sizes) + np.arange(offsets[-1])
        return KeptIds(token_ids=self.token_ids[where], offsets=offsets)

    def find_missing(self, sampled_ids: TokenIds) -> int | None:
        """The first position whose id is not in its set; None if all are."""
        sizes = self.sizes
        owners = np.repeat(np.arange(len(self)), sizes)
        found = np.zeros(len(self), dtype=np.bool_)
        found[owners[self.token_ids == np.repeat(sampled_ids, sizes)]] = True
        missing = np.flatnonzero(~found & (sizes > 0))
        return int(missing[0]) if len(missing) else None

    def to_lists(self) -> list[list[int]]:
        """One list for each position, as vLLM writes them (`sampling_mask`)."""
        return [part.tolist() for part in np.split(self.token_ids, self.offsets[1:-1])] if len(self) else []


def write_kept_ids(kept: KeptIds | None) -> dict[str, NDArray[Any]] | None:
    """The fields of kept ids on our wire, as int32 arrays."""
    return None if kept is None else {"token_ids": kept.token_ids, "sizes": kept.sizes.astype(np.int32)}


def read_kept_ids(fields: Mapping[str, Any] | None) -> KeptIds | None:
    """Read what `write_kept_ids` wrote. Raises `InvariantError` for sizes that do not fit the ids."""
    return None if fields is None else KeptIds.of_sizes(fields["token_ids"], np.asarray(fields["sizes"]))
