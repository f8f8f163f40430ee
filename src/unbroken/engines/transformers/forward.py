"""Forward passes of the embedded engine over the slot cache, scores, and a check that both agree.

Shapes: R rows, T ids per row, V vocabulary, L positions read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unbroken.engines.transformers.attention import GROUPED_SDPA, use_grouped_sdpa, without_cudnn
from unbroken.engines.transformers.images import ImageFeatures, ImageModel, PlainInputs
from unbroken.engines.transformers.kv_cache import SlotCache
from unbroken.engines.transformers.sampling import find_top
from unbroken.errors import InvalidInputError
from unbroken.exactness import attending_by, choose_attention, find_length_dependence, fix_rotary
from unbroken.images.decoding import encode_picture
from unbroken.images.embeddings import replace_sampled_placeholders
from unbroken.images.placeholders import expand_placeholders
from unbroken.images.processing import ImageProcessor
from unbroken.routing import Routers
from unbroken.types import (
    EncodedImage,
    Logprobs,
    RoutedExperts,
    TokenIds,
    TopLogprobs,
    get_expert_dtype,
    token_ids,
)

_MASKABLE_ATTENTION = ("sdpa", "eager", GROUPED_SDPA)
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
    ) -> None:
        _check_attention(model.config, context_length)
        self.model = model.eval()
        fix_rotary(model, context_length)
        choose_attention(model)
        if model.config._attn_implementation == "sdpa":
            use_grouped_sdpa(model)
        self.device: torch.device = model.device
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self._num_layers = model.config.get_text_config().num_hidden_layers
        self.cache = SlotCache(self._num_layers)
        self.routers = Routers.find(model) if records_routing else None
        self.routed_experts: RoutedExperts | None = None
        """[R, T, L, K] of the last pass, if they are recorded."""
        self.images = None if processor is None else ImageModel(model, processor)
        _check_agreement(self)
        if self.images is not None:
            self.cache = SlotCache(self._num_layers)
            _check_images(self, self.images)
        self.cache = SlotCache(self._num_layers)

    def free(self) -> None:
        """Drop the model and all keys and values; nothing else may be called after it."""
        self.model = None
        self.images = None
        self.cache = SlotCache(self._num_layers)

    def sleep(self) -> None:
        """Move the weights to the CPU and drop all keys and values."""
        self.model.to("cpu")
        self.cache = SlotCache(self._num_layers)

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
    ) -> None:
        """Store the keys and values of `ids_RT` (negative at the features of an image) without computing logits.

        `image_features` are those of the rows whose prompts have images, by index of the row.
        """
        with without_cudnn(), self._recording(positions_RT.shape):
            self.model.base_model(**self._inputs(slots_R, positions_RT, ids_RT, image_features))

    def decode(
        self,
        slots_R: NDArray[np.int64],
        positions_RT: NDArray[np.int64],
        ids_RT: TokenIds,
        *,
        image_features: Mapping[int, ImageFeatures] = MappingProxyType({}),
    ) -> torch.Tensor:
        """Return [R, V] logits after the last id of each row; stores keys and values as `prefill` does."""
        with without_cudnn(), self._recording(positions_RT.shape):
            logits: torch.Tensor = self.model(**self._inputs(slots_R, positions_RT, ids_RT, image_features)).logits
        return logits[:, -1]

    @torch.inference_mode()
    def score(
        self,
        token_ids: TokenIds,
        *,
        temperature: float,
        num_top_logprobs: int,
        image_inputs: PlainInputs | None = None,
    ) -> tuple[Logprobs, TopLogprobs | None]:
        """Return [T - 1] the logprob of each id after the first, by one plain forward pass, and the most likely ids.

        `image_inputs` are those of `ImageModel.plain_inputs`.
        """
        ids_1T = torch.from_numpy(token_ids.astype(np.int64)).to(self.device)[None]
        with without_cudnn():
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
        self.routed_experts = routed_NLK.reshape(*shape, *routed_NLK.shape[1:])

    def _run_plain(self, ids_1T: torch.Tensor, image_inputs: PlainInputs | None) -> torch.Tensor:
        """[1, T, V] logits of a pass without a cache."""
        logits: torch.Tensor
        if image_inputs is None:
            logits = self.model(input_ids=ids_1T, use_cache=False).logits
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
    ) -> dict[str, Any]:
        """Aim the cache and make the model's inputs: a row sees its slot up to its own position."""
        length = int(positions_RT.max()) + 1
        positions = torch.from_numpy(positions_RT).to(self.device)
        consecutive = bool((np.diff(slots_R) == 1).all())
        self.cache.aim(torch.from_numpy(slots_R).to(self.device), positions, length=length, consecutive=consecutive)
        hidden_R1TL = torch.arange(length, device=self.device) > positions[:, None, :, None]
        mask_R1TL = torch.zeros(hidden_R1TL.shape, dtype=self.model.dtype, device=self.device)
        return {
            **self._embed_images(positions_RT, ids_RT, image_features),
            "position_ids": positions if not image_features else self._positions(positions_RT, image_features),
            "attention_mask": mask_R1TL.masked_fill_(hidden_R1TL, float("-inf")),
            "past_key_values": self.cache,
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
    """Whether an allocation failed. On a CPU, torch's own error has no type of its own."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def _check_attention(config: Any, context_length: int) -> None:
    """Refuse models that need more than a causal mask over slots: other masks, windows, recurrent layers."""
    text_config = config.get_text_config()
    if config.is_encoder_decoder:
        raise InvalidInputError("the model must be decoder-only, got an encoder-decoder")
    implementation = config._attn_implementation
    if implementation not in _MASKABLE_ATTENTION:
        raise InvalidInputError(
            f"the model's attn_implementation must be one of {_MASKABLE_ATTENTION}, which take a mask per row, got "
            f"{implementation!r}: load it with attn_implementation='sdpa'"
        )
    window = getattr(text_config, "sliding_window", None)
    layer_types = getattr(text_config, "layer_types", None) or (["sliding_attention"] if window else [])
    for kind in sorted(set(layer_types) - {"full_attention"}):
        if kind != "sliding_attention" or window is None or window < context_length:
            raise InvalidInputError(
                f"the model has {kind} layers (sliding_window={window}), which this engine cannot cache exactly at "
                f"context_length={context_length}: use a model with full attention, or a context within the window"
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
    _refuse_difference(forward, found_RV, expected_TV[torch.from_numpy(last[:, -1]).to(forward.device)])


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
