"""Small local tokenizers: a BPE trained in the process on a built-in corpus, with the control tokens a test needs."""

import functools
import json
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = re.compile(
    r"<\|[^|<>\s'{}+]{1,40}\|>|<｜[^｜<>\s'{}+]{1,40}｜>|\[/?INST\]|\[gMASK\]|</?s>|<sop>|<bos>"
    r"|<\|[a-z_]{2,20}>|<[a-z_]{2,20}\|>"  # Gemma 4: <|turn> .. <turn|>
    r"|<(?:start|end)_of_(?:turn|utterance|image)>|<image>"
)
"""How control tokens look in chat templates; tags are control tokens that are not special."""
TAGS = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>")
END_OF_TEXT = "<|endoftext|>"

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CORPUS = """The tool answered with an error: the file was not found. Let me look at the next page instead, shall we?
system user assistant tool function name arguments content value result query number think observation
{"name": "search", "arguments": {"query": "weather in Paris", "limit": 10, "exact": true, "page": null}}
{"temperature": 21.5, "unit": "celsius", "conditions": ["sunny", "windy"], "note": "It's about 12:30 o'clock."}
def add(a, b):\n    return a + b\n\n\nfor i in range(10):\n    print(i, "->", add(i, 1))\n
# Tools\n\nYou may call one or more functions to assist with the user query.\n\n<tools>\n</tools>\n
Wie geht's? Größe, Straße; où est la bibliothèque? 今天天气怎么样 東京 😀 🎉 e\u0301a\u0308 naïve café
"""


def make_tokenizer(
    template: str | None,
    *,
    control_tokens: Sequence[str] = (),
    bos_token: str | None = None,
    eos_token: str | None = None,
    metaspace: bool = False,
) -> Any:
    """A `PreTrainedTokenizerFast` with this chat template.

    Control tokens are those that the template spells, `<|endoftext|>` and `control_tokens`; tags such as `<think>` are
    added but not special, as Qwen has them. Ids: the vocabulary first, then the control tokens, sorted.
    """
    text = " ".join([template or "", END_OF_TEXT, *control_tokens])
    special = sorted(set(SPECIAL.findall(text)) | {t for t in control_tokens if not TAGS.fullmatch(t)})
    tags = sorted(set(TAGS.findall(text)))
    backend = Tokenizer.from_str(_metaspace_bpe() if metaspace else _byte_level_bpe())
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in tags])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos_token, eos_token=eos_token or END_OF_TEXT
    )
    tokenizer.chat_template = template
    return tokenizer


def normalising(tokenizer: Any) -> Any:
    """The same tokenizer with NFKC, which finds its control tokens in normalised text too: in `＜｜im_end｜＞`."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.normalizer = normalizers.NFKC()
    state = json.loads(backend.to_str())
    for token in state["added_tokens"]:
        token["normalized"] = True
    normalised = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token=tokenizer.eos_token
    )
    normalised.chat_template = tokenizer.chat_template
    return normalised


@functools.cache
def _byte_level_bpe() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS.splitlines(keepends=True), trainer)
    return tokenizer.to_str()


@functools.cache
def _metaspace_bpe() -> str:
    """As sentencepiece models come out: words begin with a block character, the first one of a text too."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(vocab_size=900, show_progress=False, special_tokens=["<unk>"])
    tokenizer.train_from_iterator(_CORPUS.splitlines(keepends=True), trainer)
    state = json.loads(tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    return json.dumps({**state, "added_tokens": []})
