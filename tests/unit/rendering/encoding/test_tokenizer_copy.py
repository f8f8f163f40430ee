"""A copy of a tokenizer is the tokenizer, and what its owner does later does not reach it."""

import pytest

from support.corpus import corpus_templates
from support.templates import GLM, GLM_CONTROL_TOKENS, QWEN
from support.tokenizers import make_tokenizer, normalising
from unbroken.rendering.encoding.tokenizer import copy_tokenizer

TOKENIZERS = {
    "byte level": lambda: make_tokenizer(QWEN),
    "metaspace": lambda: make_tokenizer(GLM, control_tokens=GLM_CONTROL_TOKENS, metaspace=True),
    "normalising": lambda: normalising(make_tokenizer(QWEN)),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_copy_is_written_as_the_original_is(name: str) -> None:
    backend = TOKENIZERS[name]().backend_tokenizer
    assert copy_tokenizer(backend).to_str() == backend.to_str()


def test_a_copy_of_each_tokenizer_of_the_corpus_is_written_as_the_original_is() -> None:
    for template in corpus_templates():
        backend = template.tokenizer().backend_tokenizer
        assert copy_tokenizer(backend).to_str() == backend.to_str(), template.name


def test_what_the_owner_does_later_does_not_reach_the_copy() -> None:
    backend = make_tokenizer(QWEN).backend_tokenizer
    copy = copy_tokenizer(backend)
    ids = copy.encode("the file <|x|>").ids
    backend.add_special_tokens(["<|x|>"])
    backend.enable_truncation(1)
    backend.enable_padding(length=9)
    backend.pre_tokenizer = None
    backend.encode_special_tokens = True
    assert copy.encode("the file <|x|>").ids == ids
    assert len(copy.encode("<|im_end|>").ids) == 1


def test_truncation_and_padding_are_not_copied() -> None:
    backend = make_tokenizer(QWEN).backend_tokenizer
    num_ids = len(backend.encode("the file was not found").ids)
    backend.enable_truncation(1)
    backend.enable_padding(length=50)
    assert len(copy_tokenizer(backend).encode("the file was not found").ids) == num_ids


def test_added_tokens_that_are_special_or_not_in_turns_keep_their_ids() -> None:
    backend = make_tokenizer(QWEN).backend_tokenizer
    for k in range(6):
        (backend.add_tokens if k % 2 else backend.add_special_tokens)([f"<added{k}>"])
    copy = copy_tokenizer(backend)
    assert copy.get_added_tokens_decoder() == backend.get_added_tokens_decoder()
    assert copy.encode("a<added3><added4>").ids == backend.encode("a<added3><added4>").ids
