"""Small local tokenizers: a BPE trained in the process on a built-in corpus, with the control tokens a test needs."""

import base64
import functools
import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path
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


def tekken_tokenizer(
    template: str | None,
    *,
    control_tokens: Sequence[str] = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
) -> Any:
    """A tokenizer with the real vocabulary of Mistral's Tekken (131,072 ids) and this chat template.

    As there, ids 0 to 999 are for control tokens: `<unk>`, `<s>`, `</s>`, then those of the template and
    `control_tokens`, sorted; the rest are called `<SPECIAL_n>`. The vocabulary is read from where the package
    `mistral_common` is installed, which is not imported.
    """
    wanted = {*SPECIAL.findall(template or ""), *TAGS.findall(template or ""), *control_tokens} - {"<s>", "</s>"}
    names = ["<unk>", "<s>", "</s>", *sorted(wanted)]
    names += [f"<SPECIAL_{k}>" for k in range(len(names), _NUM_TEKKEN_SPECIAL)]
    state = json.loads(_tekken_bpe())
    state["model"]["vocab"] |= {name: k for k, name in enumerate(names)}
    backend = Tokenizer.from_str(json.dumps(state))
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


_NUM_TEKKEN_SPECIAL = 1000


@functools.cache
def _tekken_bpe() -> str:
    """Convert ranks to merges: each token is a merge of every pair that makes it, the earliest first."""
    spec = importlib.util.find_spec("mistral_common")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("Tekken's vocabulary is in the package mistral_common: pip install 'mistral-common>=1.13'")
    file = Path(spec.submodule_search_locations[0]) / "data" / "tekken_240911.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    size = content["config"]["default_vocab_size"] - _NUM_TEKKEN_SPECIAL
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in content["vocab"][:size]}
    merges: list[tuple[bytes, bytes]] = []
    for token in sorted(ranks, key=lambda token: ranks[token]):
        halves = [(token[:k], token[k:]) for k in range(1, len(token))]
        found = [(left, right) for left, right in halves if left in ranks and right in ranks]
        merges += sorted(found, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    spelled = dict(zip(range(256), _byte_characters(), strict=True))
    text = {token: "".join(spelled[byte] for byte in token) for token in ranks}
    backend = Tokenizer(
        models.BPE(
            {text[token]: rank + _NUM_TEKKEN_SPECIAL for token, rank in ranks.items()},
            [(text[left], text[right]) for left, right in merges],
            ignore_merges=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(content["config"]["pattern"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend.to_str()


def _byte_characters() -> list[str]:
    """The character that byte-level models write for each byte: itself where it is printable, else one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


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
    """Like converted sentencepiece models: words begin with a block character, also the first word of a text."""
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
