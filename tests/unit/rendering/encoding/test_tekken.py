"""A model that ships only `tekken.json`: mistral_common makes its ids, and ours are the same."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from unbroken import load_renderer
from unbroken.errors import InvalidInputError
from unbroken.rendering.base import Bridge
from unbroken.rendering.template import TemplateRenderer
from unbroken.types import token_ids

CONTROL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *(
        "[/TOOL_RESULTS]",
        "[TOOL_CALLS]",
        "[IMG]",
        "<pad>",
        "[IMG_BREAK]",
        "[IMG_END]",
        "[PREFIX]",
        "[MIDDLE]",
        "[SUFFIX]",
    ),
)
NUM_CONTROL = 20
WORDS = ("th", "the", " th", " the", "in", "ing", "he", "ou", "you", " you", "12", "??", "\n\n", "é")
TEXTS = ("the thing you are looking for?? 12345\n\n", " theé 今天 😀 e\u0301", "a\u00a0b\t\tc", "")
QUESTION: Any = {"role": "user", "content": "Where are you going?"}
NEXT: Any = {"role": "user", "content": "[INST] and then?</s>"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with a small vocabulary in Tekken's form, and nothing else that is a tokenizer."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [word.encode() for word in sorted(WORDS, key=lambda word: len(word.encode()))]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
        for rank, token in enumerate(tokens)
    ]
    control = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(CONTROL)]
    config = {
        "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "num_vocab_tokens": len(tokens),
        "default_vocab_size": len(tokens) + NUM_CONTROL,
        "default_num_special_tokens": NUM_CONTROL,
        "version": "v3",
    }
    folder = tmp_path_factory.mktemp("tekken")
    content = {"config": config, "vocab": vocabulary, "special_tokens": control}
    (folder / "tekken.json").write_text(json.dumps(content), encoding="utf-8")
    model = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(model), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def own(folder: Path) -> Any:
    """mistral_common's own tokenizer of the folder."""
    mistral = pytest.importorskip("mistral_common.tokens.tokenizers.mistral")
    return mistral.MistralTokenizer.from_file(str(folder / "tekken.json"))


@pytest.fixture(scope="module")
def renderer(folder: Path) -> Any:
    return load_renderer(folder)


def test_texts_and_control_tokens_have_the_ids_of_mistral_common(renderer: Any, own: Any) -> None:
    tekken = own.instruct_tokenizer.tokenizer
    for text in TEXTS:
        assert renderer._encoder.encode_plain(text).tolist() == tekken.encode(text, bos=False, eos=False)
    for token_id, text in enumerate(CONTROL):
        assert renderer.facts.control_tokens.get_id(text) == token_id == tekken.get_special_token(text)


def test_a_conversation_has_the_ids_of_mistral_common_turn_by_turn(renderer: Any, own: Any) -> None:
    from mistral_common.protocol.instruct.request import ChatCompletionRequest

    def encode(messages: list[Any]) -> list[int]:
        return list(own.encode_chat_completion(ChatCompletionRequest(messages=messages)).tokens)

    turn: Any = {"role": "assistant", "content": "the thing"}
    prompt = renderer.render([QUESTION]).token_ids
    assert prompt.tolist() == encode([QUESTION])
    sampled = token_ids([*renderer._encoder.encode_plain("the thing"), renderer.facts.control_tokens.get_id("</s>")])
    bridge = renderer.bridge_to_next_turn(prompt, sampled, [NEXT], assistant=turn, earlier=[QUESTION])
    assert isinstance(bridge, Bridge), bridge
    assert [*prompt, *sampled, *bridge.bridge_ids] == encode([QUESTION, turn, NEXT])


def test_the_tokenizer_that_transformers_loads_for_it_is_taken_too(folder: Path, renderer: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(tokenizer).__name__ == "MistralCommonBackend"
    ids = load_renderer(tokenizer).render([QUESTION]).token_ids
    assert ids.tolist() == renderer.render([QUESTION]).token_ids.tolist()
    with pytest.raises(InvalidInputError, match="got MistralCommonBackend: load the model with load_renderer"):
        TemplateRenderer(tokenizer)


def test_a_model_with_a_fast_tokenizer_beside_it_is_read_from_that(folder: Path, renderer: Any, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    backend = renderer._encoder._tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}[INST]{{ m.content }}</s>{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    for name in ("tekken.json", "config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert load_renderer(tmp_path).facts.source == tokenizer.chat_template


def test_a_missing_mistral_common_is_named_with_how_to_install_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers converts a new file without it, and refuses an old one, which does not list its control tokens."""
    import transformers.integrations.mistral.tokenizer as mistral
    import transformers.utils.import_utils as imports

    content = json.loads((folder / "tekken.json").read_text("utf-8"))
    del content["special_tokens"]
    (tmp_path / "tekken.json").write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    monkeypatch.setattr(mistral, "is_mistral_common_available", lambda: False)
    monkeypatch.setitem(
        imports.BACKENDS_MAPPING, "mistral-common", (lambda: False, imports.MISTRAL_COMMON_IMPORT_ERROR)
    )
    with pytest.raises(InvalidInputError, match="pip install mistral-common"):
        load_renderer(tmp_path)
