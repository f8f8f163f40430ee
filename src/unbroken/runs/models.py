"""The model of a run, its reference model, and its renderer."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from unbroken.decoder_config import DecoderConfig
from unbroken.errors import InvalidInputError, UnbrokenError, missing_extra
from unbroken.exactness import choose_attention
from unbroken.images.processor import ImageInputs, load_image_processor
from unbroken.rendering.base import Renderer
from unbroken.rendering.effects import check_options_read
from unbroken.rendering.loader import load_renderer
from unbroken.rendering.template import TemplateRenderer
from unbroken.runs.config import (
    Attention,
    EngineConfig,
    EngineKind,
    LoraConfig,
    ModelSettings,
    Precision,
    RendererConfig,
    RunConfig,
    is_address,
)
from unbroken.training.config import ParallelConfig, Reference
from unbroken.training.memory import Layout, ModelSizes, describe_shortage, fits_beside_engine
from unbroken.training.model.sharding import make_distributed_config, reshard
from unbroken.types import SamplingParams, encode_image_settings

_logger = logging.getLogger(__name__)


def load_image_inputs(source: str | Path, config: RunConfig, *, prompts_have_images: bool) -> ImageInputs | None:
    """How the run's model takes images; None if the run has none (`config.images`).

    Raises:
        InvalidInputError: there are images, and the model or the renderer takes none; or a setting is unknown.
    """
    settings = config.renderer.image_settings
    is_needed = bool(config.images) or prompts_have_images
    if config.images is False and prompts_have_images:
        raise InvalidInputError("images must be true or left out for prompts with images, got false")
    if config.images is False or not (is_needed or _is_image_text_only(source)):
        if settings:
            raise InvalidInputError(f"renderer.image_settings must be left out without images, got {dict(settings)}")
        return None
    why = "for prompts with images" if prompts_have_images else "with images = true"
    try:
        processor = load_image_processor(source)
    except InvalidInputError as error:
        raise InvalidInputError(f"{error} (images = false trains the model on text alone)") from None
    if processor is None and is_needed:
        raise InvalidInputError(f"model must have an image processor {why}, and {str(source)!r} has none")
    if processor is None:
        return None
    if unknown := sorted(set(settings) - processor.setting_names):
        raise InvalidInputError(
            f"renderer.image_settings must be some of {', '.join(sorted(processor.setting_names))}, got {unknown}"
        )
    return ImageInputs(processor=processor, settings=encode_image_settings(settings))


def warn_about_memory(
    source: str | Path, config: RunConfig, sizes: ModelSizes | None, *, device_bytes: float, num_processes: int = 1
) -> None:
    """Warn, before anything is loaded, if the run is estimated to need more than a GPU of so many bytes has.

    Nothing is estimated without sizes (`find_sizes`).
    """
    if sizes is None:
        return
    layout = _plan_layout(config, num_processes)
    if (shortage := describe_shortage(sizes, config.training, layout, device_bytes=device_bytes)) is not None:
        _logger.warning("%s may not fit: %s", source, shortage)


def needs_engine_memory(
    source: str | Path, config: RunConfig, sizes: ModelSizes | None, *, device_bytes: float, num_processes: int = 1
) -> bool:
    """Whether the trainer needs the memory of a colocated engine, so that this has to sleep while a step is trained.

    It sleeps where nothing can be estimated, and where its options ask for it. A teacher in the process is counted as
    large as the policy, and most are larger: enough for a warning, but not to keep memory that the trainer may need.
    """
    asks = "--enable-sleep-mode" in config.engine.options
    if asks or _count_teachers(config) or sizes is None:
        return True
    layout, longest = _plan_layout(config, num_processes), find_context_length(source, config.engine)
    return longest is None or not fits_beside_engine(
        sizes, config.training, layout, device_bytes=device_bytes, longest_row=longest
    )


def find_sizes(source: str | Path, config: RunConfig) -> ModelSizes | None:
    """The sizes of the model; None if it is trained in float32, or its config does not say them.

    The model is built without its weights, which takes seconds for some: a run does so once.
    """
    if config.precision is not Precision.BFLOAT16:
        return None
    auto = AutoModelForImageTextToText if _is_image_text_only(source) else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model = auto.from_config(AutoConfig.from_pretrained(locate(source)))
        return ModelSizes.of(model, modules=config.lora.modules if config.lora else ())
    except (AttributeError, OSError, TypeError, ValueError):
        return None


def _plan_layout(config: RunConfig, num_processes: int) -> Layout:
    """How the run lays the model out over its GPUs."""
    lora, parallel = config.lora, config.training.parallel
    has_reference = config.objective.needs_reference(config.training)
    # An adapter's reference is the model without it, unless it is synchronised and so differs.
    has_copy = has_reference and (lora is None or config.trainer.reference_sync is not None)
    return Layout(
        fsdp=parallel.fsdp,
        tensor=parallel.tensor,
        expert=parallel.expert,
        sequence=parallel.sequence,
        is_replicated=num_processes > 1 and parallel.fsdp == 1,
        lora_rank=0 if lora is None else lora.rank,
        is_base_exact=config.chosen_model_settings.dtype is Precision.FLOAT32,
        num_copies=has_copy + (config.engine.kind is EngineKind.EMBEDDED) + _count_teachers(config),
        engine_share=_find_engine_share(config),
    )


def _count_teachers(config: RunConfig) -> int:
    """How many teachers are in each process: each is counted as large as the policy, and a larger one takes more."""
    return 0 if config.teacher is None else sum(not is_address(each) for each in config.teacher.models)


def _find_engine_share(config: RunConfig) -> float:
    """The share of a GPU's memory that a colocated vLLM takes for itself: its option, or vLLM's default."""
    if config.engine.kind is not EngineKind.COLOCATED:
        return 0.0
    return float(_find_option(config.engine, "--gpu-memory-utilization", "0.9"))


def _find_option(engine: EngineConfig, name: str, default: str) -> str:
    """The value of an option of vLLM, which takes the last one of a name."""
    words = [part for word in engine.options for part in word.split("=", 1)]
    return next((words[k + 1] for k in reversed(range(len(words) - 1)) if words[k] == name), default)


_DEFAULT = ModelSettings()
_WHOLE = ParallelConfig()


def load_model(
    source: str | Path,
    settings: ModelSettings = _DEFAULT,
    *,
    takes_images: bool = False,
    parallel: ParallelConfig = _WHOLE,
    is_bfloat16: bool = False,
) -> Any:
    """Load a model, by default in float32, as the trainer needs it; of a model that processes share, this one's part.

    Raises:
        InvalidInputError: there is no such model, or it cannot have these settings.
    """
    auto: Any = AutoModelForImageTextToText if takes_images or _is_image_text_only(source) else AutoModelForCausalLM
    attention = settings.attn_implementation
    options = {"attn_implementation": attention and str(attention), **settings.kwargs}
    given = f"model_settings, got {options}" + (f", and {parallel}" if parallel.is_sharded else "")
    if parallel.is_sharded:
        options["distributed_config"] = make_distributed_config(parallel, is_bfloat16=is_bfloat16)
    try:
        model = auto.from_pretrained(
            locate(source), dtype=getattr(torch, settings.dtype or Precision.FLOAT32), **options
        )
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        raise InvalidInputError(
            f"model must be a folder or the hub's name of a model, got {str(source)!r}, which takes {given}: {error}"
        ) from None
    choose_attention(model)
    reshard(model)  # or what is still gathered would be frozen below adapters, instead of its parts
    if attention is Attention.SDPA != model.config.get_text_config()._attn_implementation:
        raise InvalidInputError(
            f"model_settings.attn_implementation must be eager or flex_attention for {type(model).__name__}, whose "
            "config asks for more than sdpa computes, got sdpa"
        )
    return model


def find_revision(source: str | Path, revision: str | None) -> str | Path:
    """The folder of this revision of a model on the hub, downloaded if need be; without a revision, `source` itself."""
    if revision is None:
        return source
    if Path(source).is_dir():
        raise InvalidInputError(f"model_settings.revision must be left out for a model in a folder, got {revision!r}")
    try:
        return snapshot_download(str(source), revision=revision, ignore_patterns=_OTHER_FORMATS)
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"model_settings.revision must be one of {str(source)!r} on the hub, got {revision!r}: {error}"
        ) from None


_OTHER_FORMATS = ["*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.pth", "original/*"]


def check_config_changes(source: str | Path, config: RunConfig) -> None:
    """Raise `InvalidInputError` if keyword arguments change the model's config, and an engine would not have it."""
    kwargs, kind = config.model_settings.kwargs, config.engine.kind
    if not kwargs or kind is EngineKind.EMBEDDED:
        return
    own = AutoConfig.from_pretrained(locate(source))
    if changed := sorted(name for name in kwargs if hasattr(own, name)):
        raise InvalidInputError(
            f"model_settings.kwargs must not change the model's config ({', '.join(changed)}) with engine.kind "
            f"{kind}, whose engine loads the model's own: change config.json in a copy of the model"
        )


def load_config(source: str | Path, settings: ModelSettings, *, takes_images: bool = False) -> Any | None:
    """The config of a model with these settings; None if there is none: `load_model` has the error.

    With `takes_images` also None if it is one of a text model.
    """
    try:
        config = AutoConfig.from_pretrained(locate(source), **settings.kwargs)
    except (OSError, TypeError, ValueError):
        return None
    return None if takes_images and type(config) not in AutoModelForImageTextToText._model_mapping else config


def check_vocabulary(renderer: Renderer, model_config: Any) -> None:
    """Raise `InvalidInputError` if a plain prompt, or a stop id, has an id that the model has no embedding for.

    The tokenizer itself may have more ids: those of padding that nothing renders.
    """
    size: int | None = model_config.get_text_config().to_dict().get("vocab_size")
    try:
        ids = renderer.render([{"role": "user", "content": "What is 1 + 1?"}]).token_ids.tolist()
    except UnbrokenError:
        ids = []  # a template may want other messages
    largest = max([*ids, *renderer.get_stop_token_ids()], default=0)
    if size is not None and largest >= size:
        raise InvalidInputError(
            f"model must have an embedding for each id of its tokenizer, got id {largest} in a prompt or as a stop id, "
            f"and a vocabulary of {size} ids (vocab_size): tokenizer and model do not belong together"
        )


def _is_image_text_only(source: str | Path) -> bool:
    """Whether transformers has the model with its image part only."""
    config = load_config(source, _DEFAULT, takes_images=True)
    return config is not None and type(config) not in AutoModelForCausalLM._model_mapping


def locate(source: str | Path) -> str:
    """The absolute path of a model's folder, or its name on the hub: what others can find it by."""
    return str(Path(source).absolute()) if Path(source).is_dir() else str(source)


def find_context_length(source: str | Path, engine: EngineConfig) -> int | None:
    """The longest sequence of the run's engine, as far as it is known before anything is started; None if it is not."""
    try:
        model = DecoderConfig(AutoConfig.from_pretrained(locate(source))).max_positions
    except (OSError, ValueError):
        return None  # `load_model` has the error
    given = _find_option(engine, "--max-model-len", "")
    own = (
        engine.embedded.context_length
        if engine.kind is EngineKind.EMBEDDED
        else int(given)
        if given.isdigit()
        else None
    )
    return own or model


def load_model_renderer(
    source: str | Path, config: RendererConfig, sampling: SamplingParams, *, images: ImageInputs | None = None
) -> TemplateRenderer:
    """Load the renderer of a model.

    Raises:
        TemplateError: its chat template is missing or does not compile.
        InvalidInputError: a variable has no effect on the template.
    """
    renderer = load_renderer(
        source,
        template_kwargs=config.template_kwargs,
        stop_token_ids=sampling.stop_token_ids,
        history=config.history,
        parser=config.parser,
        images=images,
    )
    check_options_read(renderer, config.template_kwargs, name="renderer.template_kwargs")
    return renderer


def prepare_model(model: Any, config: RunConfig, *, load_again: Callable[[], Any] | None = None) -> tuple[Any, Any]:
    """Return the model to train and its reference, or None if the loss needs no reference.

    With LoRA, the adapters are added to `model` itself and the reference is the base below them; without it, and where
    it follows the policy (`trainer.reference_sync`), the reference is a copy, or with `load_again` what it returns: a
    sharded model cannot be copied.

    Raises:
        InvalidInputError: peft is not installed, or the model has none of the modules to adapt.
    """
    needs_reference = config.objective.needs_reference(config.training)
    is_copy = needs_reference and (config.lora is None or config.trainer.reference_sync is not None)
    copy_model = load_again or partial(copy.deepcopy, model)
    reference = copy_model() if is_copy else Reference.BASE if needs_reference else None
    names = ("default",) if config.policies is None else config.policies.names
    return model if config.lora is None else _add_adapters(model, config.lora, config.seed, names), reference


def _add_adapters(model: Any, config: LoraConfig, seed: int, names: Sequence[str]) -> Any:
    """The model with an adapter for each name, of which the first is active."""
    try:
        import peft
    except ModuleNotFoundError as error:
        raise missing_extra(error, "lora needs the lora extra", "lora") from error
    torch.manual_seed(seed)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=list(config.modules) or "all-linear",
        task_type=peft.TaskType.CAUSAL_LM,
    )
    try:
        adapted = peft.get_peft_model(model, settings, adapter_name=names[0])
        for name in names[1:]:
            adapted.add_adapter(name, settings)
        return adapted
    except ValueError as error:
        names = list(config.modules)
        raise InvalidInputError(f"lora.modules must be modules of the model, got {names}: {error}") from None
