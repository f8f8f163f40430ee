"""Forward passes of the embedded engine over its cache of slots, scores, and a check that both agree.

Each row of a batch reads and writes keys and values at its own position of its own slot. That works with any decoder of
transformers that takes a `Cache` and a four-dimensional attention mask. Before a pass the cache is aimed (which slots,
which positions); then every layer stores its new keys there and returns the keys of those slots from position 0 on. The
mask hides later positions and leftovers of an earlier row.

Shapes: S slots, N positions a slot holds, R rows, T ids per row, V vocabulary, L positions read, H query heads, G
key-value heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from unbroken.decoder_config import DecoderConfig
from unbroken.engines.transformers.adapters import BASE, RowAdapters
from unbroken.engines.transformers.images import ImageFeatures, ImageModel, PlainInputs
from unbroken.engines.transformers.sampling import find_top
from unbroken.errors import InvalidInputError
from unbroken.exactness import (
    BLOCK,
    EXACT_ATTENTION,
    attend_exactly,
    attending_by,
    choose_attention,
    find_length_dependence,
    fix_rotary,
)
from unbroken.images.decoder import encode_picture
from unbroken.images.embeddings import replace_sampled_placeholders
from unbroken.images.placeholders import expand_placeholders
from unbroken.images.processor import ImageProcessor
from unbroken.routing import Routers
from unbroken.types import (
    EncodedImage,
    Logprobs,
    Numerics,
    RoutedExperts,
    TokenIds,
    TopLogprobs,
    get_expert_dtype,
    token_ids,
)

GROUPED_SDPA = "unbroken_grouped_sdpa"
"""The name for `set_attn_implementation`."""
_MASKABLE_ATTENTION = ("sdpa", "eager", GROUPED_SDPA, EXACT_ATTENTION)
_PROBE_LENGTH = 12
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_TOLERANCE_HALF = 0.2


class SlotForward:
    """A decoder-only transformers model whose keys and values live in slots. Used in inference mode only.

    The constructor fixes the model's rotary factors for the context, and raises `InvalidInputError` for a model on
    which cached and plain forward passes disagree: it checks the layer types, and runs both on a short sequence.
    """

    def __init__(
        self,
        model: Any,
        *,
        context_length: int,
        processor: ImageProcessor | None = None,
        records_routing: bool = False,
        numerics: Numerics = Numerics.FAST,
    ) -> None:
        check_layers(model.config, context_length)
        _check_attention(model.config)
        self.model = model.eval()
        fix_rotary(model, context_length)
        choose_attention(model)
        self.is_exact = numerics is Numerics.EXACT
        self.row_multiple = 1
        """The rows of a pass, times ids, are filled up to a multiple."""
        if self.is_exact:
            self.row_multiple = attend_exactly(model, takes_images=processor is not None)
        elif model.config._attn_implementation == "sdpa":
            _use_grouped_sdpa(model)
        self.device: torch.device = model.device
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self.adapters = RowAdapters(exact_multiple=self.row_multiple if self.is_exact else None)
        self._num_layers = model.config.get_text_config().num_hidden_layers
        self.cache = _SlotCache(self._num_layers)
        # transformers 5.24 warns of the name that it had before, and models of other code still have that one.
        self._cache_name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
        self.routers = Routers.find(model) if records_routing else None
        self.routed_experts: RoutedExperts | None = None
        """[R, T, L, K] of the last pass, if they are recorded."""
        self.images = None if processor is None else ImageModel(model, processor)
        _check_agreement(self)
        if self.images is not None:
            self.cache = _SlotCache(self._num_layers)
            _check_images(self, self.images)
        self.cache = _SlotCache(self._num_layers)

    def free(self) -> None:
        """Drop the model and all keys and values; nothing else may be called after it."""
        self.model = None
        self.images = None
        self.cache = _SlotCache(self._num_layers)

    def sleep(self) -> None:
        """Move the weights to the CPU and drop all keys and values."""
        self.model.to("cpu")
        self.cache = _SlotCache(self._num_layers)

    def wake(self) -> None:
        """Move the weights back."""
        self.model.to(self.device)

    def prefill(
        self,
        slots_R: NDArray[np.int64],
        positions_RT: NDArray[np.int64],
        ids_RT: TokenIds,
        *,
        image_features: Mapping[int, ImageFeatures] = MappingProxyType({}),
        adapters_R: NDArray[np.int64] | None = None,
    ) -> None:
        """Store the keys and values of `ids_RT` (negative at the features of an image) without computing logits.

        `image_features` are those of the rows whose prompts have images, by index of the row; `adapters_R` the numbers
        of the rows' adapters (`RowAdapters`), and None stands for the model itself.
        """
        with _without_cudnn(), self._recording(positions_RT.shape):
            self.model.base_model(**self._inputs(slots_R, positions_RT, ids_RT, image_features, adapters_R))

    def decode(
        self,
        slots_R: NDArray[np.int64],
        positions_RT: NDArray[np.int64],
        ids_RT: TokenIds,
        *,
        image_features: Mapping[int, ImageFeatures] = MappingProxyType({}),
        adapters_R: NDArray[np.int64] | None = None,
    ) -> torch.Tensor:
        """Return [R, V] logits after the last id of each row; stores keys and values as `prefill` does."""
        with _without_cudnn(), self._recording(positions_RT.shape):
            inputs = self._inputs(slots_R, positions_RT, ids_RT, image_features, adapters_R)
            logits: torch.Tensor = self.model(**inputs).logits
        return logits[: len(slots_R), -1]

    @torch.inference_mode()
    def score(
        self, token_ids: TokenIds, *, temperature: float, num_top_logprobs: int, image_inputs: PlainInputs | None = None
    ) -> tuple[Logprobs, TopLogprobs | None]:
        """Return [T - 1] the logprob of each id after the first, by one plain forward pass, and the most likely ids.

        `image_inputs` are those of `ImageModel.plain_inputs`.
        """
        ids_1T = torch.from_numpy(token_ids.astype(np.int64)).to(self.device)[None]
        with _without_cudnn():
            logits = self._run_plain(ids_1T, image_inputs)
        logits_TV = logits[0, :-1].float() / temperature
        logprobs_TV = torch.log_softmax(logits_TV, -1)
        logprobs: Logprobs = logprobs_TV.gather(1, ids_1T[0, 1:, None])[:, 0].cpu().numpy()
        if not num_top_logprobs:
            return logprobs, None
        top_logprobs, top_ids = find_top(logprobs_TV, num_top_logprobs)
        return logprobs, TopLogprobs(token_ids=top_ids, logprobs=top_logprobs)

    @contextmanager
    def _recording(self, shape: tuple[int, ...]) -> Iterator[None]:
        if self.routers is None:
            yield
            return
        with self.routers.recording() as chosen:
            yield
        routed_NLK = self.routers.stack(chosen).cpu().numpy().astype(get_expert_dtype(self.routers.num_experts))
        self.routed_experts = routed_NLK[: math.prod(shape)].reshape(*shape, *routed_NLK.shape[1:])

    def _run_plain(self, ids_1T: torch.Tensor, image_inputs: PlainInputs | None) -> torch.Tensor:
        """[1, T, V] logits of a pass without a cache."""
        logits: torch.Tensor
        self.adapters.choose(np.full(len(ids_1T), BASE), self.device)
        if image_inputs is None:
            num_ids = ids_1T.shape[1]
            filled_1T = pad(ids_1T, (0, -num_ids % self.row_multiple))
            logits = self.model(input_ids=filled_1T, use_cache=False).logits[:, :num_ids]
        else:
            with replace_sampled_placeholders(self.model, ids_1T, image_inputs.token_types_1T) as fed_1T:
                logits = self.model(input_ids=fed_1T, use_cache=False, **image_inputs.tensors).logits
        return logits

    def _inputs(
        self,
        slots_R: NDArray[np.int64],
        positions_RT: NDArray[np.int64],
        ids_RT: TokenIds,
        image_features: Mapping[int, ImageFeatures],
        adapters_R: NDArray[np.int64] | None,
    ) -> dict[str, Any]:
        """Aim the cache and make the model's inputs: a row sees its slot up to its own position."""
        adapters_R = np.full(len(slots_R), BASE) if adapters_R is None else adapters_R
        if missing := -len(slots_R) % (self.row_multiple // math.gcd(positions_RT.shape[1], self.row_multiple)):
            repeated = np.pad(np.arange(len(slots_R)), (0, missing), mode="edge")
            slots_R, positions_RT, ids_RT = slots_R[repeated], positions_RT[repeated], ids_RT[repeated]
            adapters_R = adapters_R[repeated]
        self.adapters.choose(adapters_R, self.device)
        length = int(positions_RT.max()) + 1
        if self.is_exact:  # whole blocks, which attention then takes as they lie
            length = min(length + -length % BLOCK, self.cache.capacity)
        positions = torch.from_numpy(positions_RT).to(self.device)
        consecutive = bool((np.diff(slots_R) == 1).all())
        self.cache.aim(torch.from_numpy(slots_R).to(self.device), positions, length=length, consecutive=consecutive)
        hidden_R1TL = torch.arange(length, device=self.device) > positions[:, None, :, None]
        mask_R1TL = torch.zeros(hidden_R1TL.shape, dtype=self.model.dtype, device=self.device)
        return {
            **self._embed_images(positions_RT, ids_RT, image_features),
            "position_ids": positions if not image_features else self._positions(positions_RT, image_features),
            "attention_mask": mask_R1TL.masked_fill_(hidden_R1TL, float("-inf")),
            self._cache_name: self.cache,
            "use_cache": True,
        }

    def _embed_images(
        self, positions_RT: NDArray[np.int64], ids_RT: TokenIds, image_features: Mapping[int, ImageFeatures]
    ) -> dict[str, torch.Tensor]:
        """Return the ids, or embeddings if there are images."""
        ids = torch.from_numpy(np.maximum(ids_RT, 0).astype(np.int64)).to(self.device)
        if self.images is None or not any((ids_RT[row] < 0).any() for row in image_features):
            return {"input_ids": ids}
        embeds_RTH = self.model.get_input_embeddings()(ids)
        for row, features in image_features.items():
            self.images.write_features(embeds_RTH[row], positions_RT[row], features)
        return {"inputs_embeds": embeds_RTH}

    def _positions(self, positions_RT: NDArray[np.int64], image_features: Mapping[int, ImageFeatures]) -> torch.Tensor:
        """Return positions [R, T], or [3, R, T] for a model with multimodal rope."""
        if any(features.images.rope is None for features in image_features.values()):
            return torch.from_numpy(positions_RT).to(self.device)
        rope_3RT = np.repeat(positions_RT[None], 3, axis=0)
        for row, features in image_features.items():
            rope_3RT[:, row] = features.images.rope_at(positions_RT[row])
        return torch.from_numpy(rope_3RT).to(self.device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed. On a CPU, torch raises a plain `RuntimeError`."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def check_layers(config: Any, context_length: int) -> None:
    """Raise `InvalidInputError` for a model's config with more than a causal mask over slots: other masks, windows,
    recurrent layers.
    """
    if config.is_encoder_decoder:
        raise InvalidInputError("the model must be decoder-only, got an encoder-decoder")
    decoder = DecoderConfig(config)
    window = decoder.window
    # Mistral's config has a window and no kinds of layers: all of them have the window.
    kinds = decoder.layer_kinds or ({"sliding_attention"} if window else set())
    for kind in sorted(kinds - {"full_attention"}):
        if kind != "sliding_attention" or window is None or window < context_length:
            raise InvalidInputError(
                f"the model has {kind} layers (sliding_window={window}), which this engine cannot cache exactly at "
                f"context_length={context_length}: use a model with full attention, or a context within the window"
            )


def _check_attention(config: Any) -> None:
    implementation = config._attn_implementation
    if implementation not in _MASKABLE_ATTENTION:
        raise InvalidInputError(
            f"the model's attn_implementation must be one of {_MASKABLE_ATTENTION}, which take a mask per row, got "
            f"{implementation!r}: load it with attn_implementation='sdpa'"
        )


@torch.inference_mode()
def _check_agreement(forward: SlotForward) -> None:
    """Refuse a model whose cached forward passes, in pieces and over two different rows, differ from a plain one."""
    ids_T = (np.arange(1, _PROBE_LENGTH + 1) * 7919 % forward.vocab_size).astype(np.int32)
    name = type(forward.model).__name__
    with attending_by(forward.model, "eager"):
        ids_1T = torch.from_numpy(ids_T[None].astype(np.int64)).to(forward.device)
        expected_TV = forward.model(input_ids=ids_1T).logits[0]
    if (reason := find_length_dependence(forward.model)) is not None:
        raise InvalidInputError(f"{name} computes a row otherwise beside a longer one: {reason}")
    forward.cache.reserve(3, _PROBE_LENGTH)
    slots, offsets = np.array([0, 2]), np.array([[3], [0]])
    try:
        forward.prefill(slots[:1], np.arange(3)[None], ids_T[None, :3])
        piece = offsets + np.arange(5)
        forward.prefill(slots, piece, ids_T[piece])
        last = offsets + 5 + np.arange(2)
        found_RV = forward.decode(slots, last, ids_T[last])
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise InvalidInputError(f"{name} does not run with a cache of slots: {error}") from error
    places = torch.from_numpy(last[:, -1]).to(forward.device)
    _refuse_difference(forward, found_RV, expected_TV[places])
    if forward.is_exact and not torch.equal(found_RV, forward._run_plain(ids_1T, None)[0, places]):
        raise InvalidInputError(f"numerics must be fast for {name}: with a cache it computes other bits than without")


@torch.inference_mode()
def _check_images(forward: SlotForward, images: ImageModel) -> None:
    """Do the same for a sequence with two images, the second of which is read in two pieces."""
    processor = images.processor
    ids = token_ids([1, 2, processor.placeholder_id, 3, processor.placeholder_id, 4, 5])
    ids_T, spans = expand_placeholders(ids, _probe_pictures(), processor)
    prepared = images.prepare(ids_T, spans)
    cut, length = spans[1].offset + 1, len(ids_T)
    forward.cache.reserve(1, length)
    slot, image_features = np.zeros(1, dtype=np.int64), {0: ImageFeatures(images=prepared)}
    try:
        inputs = images.plain_inputs(ids_T, spans, prepared.images)
        ids_1T = torch.from_numpy(ids_T[None].astype(np.int64)).to(forward.device)
        expected_TV = forward._run_plain(ids_1T, inputs)[0]
        for piece in (np.arange(cut), np.arange(cut, length - 1)):
            forward.prefill(slot, piece[None], prepared.keys[None, piece], image_features=image_features)
        last = np.array([[length - 1]])
        found_RV = forward.decode(slot, last, prepared.keys[last], image_features=image_features)
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise InvalidInputError(f"{type(forward.model).__name__} does not run with images here: {error}") from error
    _refuse_difference(forward, found_RV, expected_TV[-1:])


def _probe_pictures() -> list[EncodedImage]:
    from PIL import Image

    wide = Image.radial_gradient("L").resize((84, 56)).convert("RGB")
    return [encode_picture(wide), encode_picture(wide.rotate(90, expand=True))]


def _refuse_difference(forward: SlotForward, found_RV: torch.Tensor, expected_RV: torch.Tensor) -> None:
    expected_RV = expected_RV.double()
    scale = (expected_RV - expected_RV.mean(dim=-1, keepdim=True)).norm()
    difference = float((found_RV.double() - expected_RV).norm() / scale.clamp_min(torch.finfo(torch.float32).tiny))
    tolerance = _TOLERANCE.get(forward.model.dtype, _TOLERANCE_HALF)
    if not difference <= tolerance:
        raise InvalidInputError(
            f"{type(forward.model).__name__} gives other logits with a cache of slots than without (relative "
            f"difference {difference:.2g}, allowed {tolerance:g}): its attention cannot be batched exactly here"
        )


@dataclass(slots=True, kw_only=True)
class _Aim:
    """Where the next forward pass reads and writes; one object shared by all layers."""

    num_slots: int = 0
    capacity: int = 0
    read: slice | torch.Tensor = field(default_factory=lambda: slice(0, 0))
    """The slots of the rows: a slice, which copies nothing, if they are consecutive; else [R]."""
    write_slots_R1: torch.Tensor | None = None
    write_positions_RT: torch.Tensor | None = None
    length: int = 0
    """Positions [0, length) are read."""


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """Keys and values [S, H, N, D] of one layer."""

    def __init__(self, aim: _Aim) -> None:
        super().__init__()
        self._aim = aim

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = self._allocate(key_states)
        self.values = self._allocate(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [R, H, T, D] at the aim and return [R, H, length, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        aim = self._aim
        self.keys[aim.write_slots_R1, :, aim.write_positions_RT] = key_states.transpose(1, 2)
        self.values[aim.write_slots_R1, :, aim.write_positions_RT] = value_states.transpose(1, 2)
        return self.keys[aim.read, :, : aim.length], self.values[aim.read, :, : aim.length]

    def resize(self) -> None:
        """Make room for exactly the aim's slots and positions, keeping what is stored there."""
        if self.is_initialized:
            self.keys = self._fit(self.keys)
            self.values = self._fit(self.values)

    def erase(self) -> None:
        if self.is_initialized:
            self.keys.zero_()
            self.values.zero_()

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self.keys[target, :, :length] = self.keys[source, :, :length]
        self.values[target, :, :length] = self.values[source, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._aim.length, 0

    def get_seq_length(self) -> int:
        return self._aim.length

    def get_max_length(self) -> int:
        return -1

    def _allocate(self, states: torch.Tensor) -> torch.Tensor:
        # Zeros: masked positions are multiplied by 0, and uninitialised memory may hold NaN.
        return states.new_zeros(self._aim.num_slots, states.shape[1], self._aim.capacity, states.shape[3])

    def _fit(self, stored: torch.Tensor) -> torch.Tensor:
        num_slots, capacity = self._aim.num_slots, self._aim.capacity
        if (stored.shape[0], stored.shape[2]) == (num_slots, capacity):
            return stored
        fitting, kept = self._allocate(stored), stored[:num_slots, :, :capacity]
        fitting[: kept.shape[0], :, : kept.shape[2]] = kept
        return fitting


class _SlotCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """Slots of keys and values for all layers; memory is taken when first used and when it grows."""

    def __init__(self, num_layers: int) -> None:
        self._aim = _Aim()
        super().__init__(layers=[_SlotLayer(self._aim) for _ in range(num_layers)])

    @property
    def capacity(self) -> int:
        """Positions of each slot."""
        return self._aim.capacity

    def reserve(self, num_slots: int, capacity: int) -> None:
        """Grow to at least `num_slots` slots of `capacity` positions each; if memory is too small, stay as before."""
        aim = self._aim
        before = aim.num_slots, aim.capacity
        if num_slots > aim.num_slots or capacity > aim.capacity:
            aim.num_slots, aim.capacity = max(num_slots, aim.num_slots), max(capacity, aim.capacity)
            try:
                for layer in self.layers:
                    layer.resize()
            except (MemoryError, RuntimeError):
                aim.num_slots, aim.capacity = before
                for layer in self.layers:
                    layer.resize()
                raise

    def aim(self, slots_R: torch.Tensor, positions_RT: torch.Tensor, *, length: int, consecutive: bool) -> None:
        """Set where the next forward pass reads and writes; `consecutive` slots are read without a copy."""
        first = int(slots_R[0])
        self._aim.read = slice(first, first + len(slots_R)) if consecutive else slots_R
        self._aim.write_slots_R1 = slots_R[:, None]
        self._aim.write_positions_RT = positions_RT
        self._aim.length = length

    @torch.inference_mode()
    def erase(self) -> None:
        """Set everything to zero: a masked NaN is still NaN, because it is multiplied by 0."""
        for layer in self.layers:
            layer.erase()

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy positions [0, length) from one slot to another."""
        for layer in self.layers:
            layer.copy_prefix(source, target, length)


def _use_grouped_sdpa(model: Any) -> None:
    """Switch a model from `sdpa` to the grouped attention. Idempotent."""
    AttentionInterface.register(GROUPED_SDPA, _grouped_sdpa)
    AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)
    model.set_attn_implementation(GROUPED_SDPA)


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Keep cuDNN out of attention: it compiles a plan for each new shape, and here every step has a new one.

    On an H200 a plan took 15 to 60 ms, more than the rest of a step of a 0.6B model. The switch is global: other
    threads do without cuDNN until then, and compute the same.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]  # an untyped corner of torch
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of `query` [R, H, T, D] over `key` and `value` [R, G, L, D], as [R, T, H, D].

    With a mask, the `sdpa` attention of transformers copies all keys and values of the batch once per group of query
    heads and layer, which took most of a decoding step on a CPU. For a single query position the heads of a group can
    take the place of positions, and nothing is copied. All other steps, and the masks, use transformers' own `sdpa`.
    """
    num_rows, num_heads, num_positions, head_dim = query.shape
    num_groups = key.shape[1]
    if num_positions > 1 or num_groups == num_heads or attention_mask is None or attention_mask.shape[1] > 1:
        attended: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
        return attended
    grouped = query.reshape(num_rows, num_groups, num_heads // num_groups, head_dim)
    output = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling")
    )
    return output.reshape(num_rows, 1, num_heads, value.shape[-1]), None
