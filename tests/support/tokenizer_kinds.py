"""Small tokenizers of every kind that chat models use, each with the control tokens of a template.

They differ in how they treat spaces, unknown characters and added tokens; how well they compress does not matter.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from support.tokenizers import _CORPUS, END_OF_TEXT, SPECIAL, TAGS, _byte_level_bpe

_SPACES_BACK = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
_SPACES_AND_FIRST_BACK = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerKind:
    """How to make a tokenizer of this kind, and which parts of a text it preserves."""

    make_backend: Callable[[], Tokenizer]
    """Without added tokens."""
    options: Mapping[str, bool] = field(default_factory=dict)
    """Of the control tokens: `lstrip`, `normalized`, .."""
    more_tokens: Sequence[str] = ()
    """Added tokens that the template does not write."""
    in_vocabulary: bool = False
    """The model's own vocabulary has the control tokens too, as sentencepiece's has."""
    keeps: Callable[[str], str] | None = str
    """What decoding gives back of a text; None if it loses characters."""

    def tokenizer(self, template: str, control_tokens: Sequence[str] = ()) -> Any:
        text = " ".join([template, END_OF_TEXT, *control_tokens])
        special = sorted({*SPECIAL.findall(text), *(t for t in control_tokens if not TAGS.fullmatch(t)), "<unk>"})
        tags = sorted(set(TAGS.findall(text)))
        backend = Tokenizer.from_str(self.make_backend().to_str())
        if self.in_vocabulary:
            backend = _with_vocabulary(backend, [*special, *tags])
        options = {"normalized": False, **self.options}
        backend.add_special_tokens([AddedToken(token, special=True, **options) for token in special])
        backend.add_tokens([AddedToken(token, special=False, **options) for token in tags])
        backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in self.more_tokens])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_OF_TEXT)
        tokenizer.chat_template = template
        return tokenizer


def _without_spaces(text: str) -> str:
    return text.replace(" ", "").replace("▁", "")


def _nfkc(text: str) -> str:
    return normalizers.NFKC().normalize_str(text)


def _lower(text: str) -> str:
    return normalizers.Lowercase().normalize_str(text)


@functools.cache
def _sentencepiece_bpe(*, has_bytes: bool, has_unknown: bool) -> str:
    tokenizer = Tokenizer(
        models.BPE(byte_fallback=has_bytes, fuse_unk=True, unk_token="<unk>" if has_unknown else None)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    special = ["<unk>"] if has_unknown else []
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, special_tokens=special)
    tokenizer.train_from_iterator(_CORPUS.splitlines(keepends=True)[:8], trainer)
    state = json.loads(tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    for byte in range(256 if has_bytes else 0):
        vocabulary.setdefault(f"<0x{byte:02X}>", len(vocabulary))
    return json.dumps({**state, "added_tokens": [], "pre_tokenizer": None})


@functools.cache
def _unigram(*, has_bytes: bool) -> str:
    """A unigram model of words and characters; longer ones are more likely."""
    words = {f"▁{word}" for word in _CORPUS.split()} | {word for word in _CORPUS.split() if len(word) < 5}
    pieces = sorted(words | set(_CORPUS.replace(" ", "▁")[:600]) | {"▁▁"})
    vocabulary = [("<unk>", 0.0), *((piece, -12.0 + min(len(piece), 8)) for piece in pieces)]
    if has_bytes:
        vocabulary += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    return Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=has_bytes)).to_str()


def _metaspace(scheme: str, *, has_bytes: bool = True, has_unknown: bool = True, unigram: bool = False) -> Tokenizer:
    model = (
        _unigram(has_bytes=has_bytes) if unigram else _sentencepiece_bpe(has_bytes=has_bytes, has_unknown=has_unknown)
    )
    tokenizer = Tokenizer.from_str(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = _SPACES_BACK if scheme == "never" else _SPACES_AND_FIRST_BACK
    return tokenizer


def _by_normaliser(*parts: Any) -> Tokenizer:
    """Spaces become blocks in the normaliser, as in older conversions and in Gemma's."""
    tokenizer = Tokenizer.from_str(_sentencepiece_bpe(has_bytes=True, has_unknown=True))
    if not parts:
        tokenizer = _with_vocabulary(tokenizer, ["▁▁", "▁▁▁▁"])
    tokenizer.normalizer = normalizers.Sequence([*parts, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = _SPACES_AND_FIRST_BACK if parts else _SPACES_BACK
    return tokenizer


def _byte_level(normalizer: Any = None, *, prefix_space: bool = False, ignore_merges: bool = False) -> Tokenizer:
    state = json.loads(_byte_level_bpe())
    state["model"]["ignore_merges"] = ignore_merges
    tokenizer = Tokenizer.from_str(json.dumps(state))
    if ignore_merges:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if prefix_space:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def _with_vocabulary(backend: Tokenizer, tokens: Sequence[str]) -> Tokenizer:
    """A model that also knows these texts, and would merge them before anything else."""
    state = json.loads(backend.to_str())
    model = state["model"]
    if model["type"] == "Unigram":
        model["vocab"] += [[token, 0.0] for token in tokens if token != "<unk>"]
        return Tokenizer.from_str(json.dumps(state))
    vocabulary = model["vocab"]
    merges = []
    for token in tokens:
        if all(character in vocabulary for character in token):
            for end in range(2, len(token) + 1):
                vocabulary.setdefault(token[:end], len(vocabulary))
                merges.append([token[: end - 1], token[end - 1]])
        vocabulary.setdefault(token, len(vocabulary))
    model["merges"] = merges + [merge for merge in model["merges"] if merge not in merges]
    return Tokenizer.from_str(json.dumps(state))


KINDS: Mapping[str, TokenizerKind] = {
    "bytes": TokenizerKind(make_backend=_byte_level),
    "bytes, a space before all": TokenizerKind(
        make_backend=functools.partial(_byte_level, prefix_space=True), keeps=_without_spaces
    ),
    "bytes, the vocabulary spells the control tokens": TokenizerKind(
        make_backend=functools.partial(_byte_level, ignore_merges=True), in_vocabulary=True
    ),
    "bytes, tokens for white space": TokenizerKind(
        make_backend=_byte_level, more_tokens=("\n", "\n\n", "  ", "    ", "\t")
    ),
    "bytes, tokens that begin others": TokenizerKind(
        make_backend=_byte_level, more_tokens=("<|", "<|im", "<|im_end", "<|im_end|>x", "|>", "<tool", "ool_c")
    ),
    "bytes, tokens take spaces before them": TokenizerKind(
        make_backend=_byte_level, options={"lstrip": True}, keeps=lambda text: "".join(text.split())
    ),
    "bytes, tokens take spaces after them": TokenizerKind(
        make_backend=_byte_level, options={"rstrip": True}, keeps=lambda text: "".join(text.split())
    ),
    "bytes, NFKC": TokenizerKind(make_backend=functools.partial(_byte_level, normalizers.NFKC()), keeps=_nfkc),
    "bytes, NFKC before tokens are looked for": TokenizerKind(
        make_backend=functools.partial(_byte_level, normalizers.NFKC()), options={"normalized": True}, keeps=_nfkc
    ),
    "bytes, lower case before tokens are looked for": TokenizerKind(
        make_backend=functools.partial(_byte_level, normalizers.Lowercase()), options={"normalized": True}, keeps=_lower
    ),
    "sentencepiece BPE, first": TokenizerKind(
        make_backend=functools.partial(_metaspace, "first"), keeps=_without_spaces
    ),
    "sentencepiece BPE, always": TokenizerKind(
        make_backend=functools.partial(_metaspace, "always"), keeps=_without_spaces
    ),
    "sentencepiece BPE, never": TokenizerKind(
        make_backend=functools.partial(_metaspace, "never"), keeps=lambda text: text.replace("▁", " ")
    ),
    "sentencepiece BPE, the vocabulary spells the control tokens": TokenizerKind(
        make_backend=functools.partial(_metaspace, "first"), in_vocabulary=True, keeps=_without_spaces
    ),
    "sentencepiece BPE without bytes": TokenizerKind(
        make_backend=functools.partial(_metaspace, "first", has_bytes=False), keeps=None
    ),
    "sentencepiece BPE without bytes or unknown": TokenizerKind(
        make_backend=functools.partial(_metaspace, "never", has_bytes=False, has_unknown=False), keeps=None
    ),
    "sentencepiece BPE, older": TokenizerKind(
        make_backend=lambda: _by_normaliser(normalizers.Prepend("▁")), in_vocabulary=True, keeps=_without_spaces
    ),
    "sentencepiece BPE, tokens for runs of spaces": TokenizerKind(
        make_backend=_by_normaliser, more_tokens=("\n", "\n\n", "▁▁", "▁▁▁▁"), keeps=_without_spaces
    ),
    "Unigram with unknown": TokenizerKind(
        make_backend=functools.partial(_metaspace, "always", has_bytes=False, unigram=True),
        in_vocabulary=True,
        keeps=None,
    ),
    "Unigram with bytes": TokenizerKind(
        make_backend=functools.partial(_metaspace, "first", unigram=True),
        in_vocabulary=True,
        # Its own encoding reads the name of a byte as that byte.
        keeps=lambda text: _without_spaces(text).replace("<0x0A>", "\n"),
    ),
}
