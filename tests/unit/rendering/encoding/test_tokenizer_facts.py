"""Facts that were written and read again are those of the tokenizer that transformers loads, of every kind."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from support.corpus import corpus_templates
from support.templates import QWEN
from support.tokenizer_kinds import KINDS
from support.tokenizers import make_tokenizer
from unbroken.errors import InvalidInputError
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.rendering.encoding.tokenizer import TokenizerFacts
from unbroken.rendering.loader import load_tokenizer
from unbroken.rendering.template import TemplateRenderer

CLASSES = {
    "TokenizersBackend": "bytes, NFKC",
    "Qwen2Tokenizer": "bytes",
    "GPT2Tokenizer": "bytes, NFKC",
    "CohereTokenizer": "bytes",
    "LlamaTokenizer": "sentencepiece BPE, first",
    "GemmaTokenizer": "sentencepiece BPE, older",
    "T5Tokenizer": "Unigram with bytes",
}
"""Classes that make normaliser, pre-tokenizer or vocabulary themselves, all but the first; the kind of their file."""
TEXTS = (
    "It's 12:30, naïve café, 今天天气 😀\n\n  two  spaces <|im_end|> </think>",
    " ﬁ Ⅳ e\u0301 <unk> ▁x <0x0A>\t",
    "<|im_start|>user\n",
)


def read_again(tokenizer: Any) -> TokenizerFacts:
    facts = TokenizerFacts.of(tokenizer)
    again = TokenizerFacts.from_bytes(facts.to_bytes())
    assert again.to_bytes() == facts.to_bytes()
    for name in ("chat_template", "special_tokens", "eos_token_id", "response_template", "vocab_size"):
        assert getattr(again, name) == getattr(facts, name), name
    assert again.vocab_size == len(tokenizer)
    assert again.special_tokens == tokenizer.special_tokens_map
    return again


def assert_same(again: TokenizerFacts, tokenizer: Any) -> None:
    codec = TextCodec(again)
    for text in TEXTS:
        for special in (False, True):
            ids = tokenizer.encode(text, add_special_tokens=special)
            assert codec.encode(text, add_special_tokens=special).tolist() == ids
            for skip in (False, True):
                decoded = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=skip)
                assert codec.decode(ids, skip_special_tokens=skip) == decoded
    assert again.backend.get_vocab(True) == tokenizer.get_vocab()
    assert again.backend.get_added_tokens_decoder() == tokenizer.added_tokens_decoder


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_tokenizer(kind: str, tmp_path: Path) -> None:
    KINDS[kind].tokenizer(QWEN).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert_same(read_again(tokenizer), tokenizer)


@pytest.mark.parametrize("name", CLASSES)
def test_classes_that_do_not_take_the_file_as_it_is(name: str, tmp_path: Path) -> None:
    KINDS[CLASSES[name]].tokenizer(QWEN).save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tokenizer_class": name}))
    tokenizer = load_tokenizer(str(tmp_path))
    is_file = json.loads(tokenizer.backend_tokenizer.to_str()) == json.loads((tmp_path / "tokenizer.json").read_text())
    assert is_file == (name == "TokenizersBackend")
    assert_same(read_again(tokenizer), tokenizer)


def test_each_template_of_the_corpus() -> None:
    for template in corpus_templates():
        tokenizer = template.tokenizer()
        assert read_again(tokenizer).chat_template == tokenizer.chat_template == template.source, template.name


def test_several_templates_and_a_response_template(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(None)
    tokenizer.chat_template = {"default": QWEN, "rag": "{{ messages[0].content }}\ud83d\n"}
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "fields": {}}
    read_again(tokenizer)


def test_a_renderer_of_facts_renders_as_one_of_the_tokenizer() -> None:
    tokenizer = make_tokenizer(QWEN)
    messages = [{"role": "user", "content": "the file <|im_end|>"}]
    ours = TemplateRenderer(read_again(tokenizer), stop_token_ids=[3])
    theirs = TemplateRenderer(tokenizer, stop_token_ids=[3])
    assert ours.render(messages).token_ids.tolist() == theirs.render(messages).token_ids.tolist()
    assert ours.get_stop_token_ids() == theirs.get_stop_token_ids()
    assert ours.facts.source == theirs.facts.source


def test_a_tokenizer_of_the_library_tokenizers_is_refused() -> None:
    with pytest.raises(
        InvalidInputError, match="must be a fast tokenizer of transformers, got Tokenizer: load the model"
    ):
        TextCodec(Tokenizer(models.BPE()))
