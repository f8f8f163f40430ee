"""What a caller can get wrong, in every dialect: at once a 4xx with field, rule and value, and nothing else happens."""

import json
import time
from typing import Any

import httpx
import numpy as np
import pytest

from support.servers import MODEL, asgi_client, make_app, scripted_engine, server_tokenizer
from unbroken import compact
from unbroken.engines.scripted import ScriptedEngine
from unbroken.errors import InvalidInputError
from unbroken.server.config import ServerLimits

USER = [{"role": "user", "content": "hi"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,xx"}}]}]
NATIVE, TRL, TEXT, TOKENS, VLLM = (
    "/v1/sample", "/generate/", "/v1/completions", "/v1/chat/completions/tokens", "/inference/v1/generate",
)  # fmt: skip
CHAT, TRL_CHAT, SCORE, TRL_SCORE = "/v1/chat/completions", "/chat/", "/v1/score", "/get_sequence_logprobs/"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
GOOD: dict[str, dict[str, Any]] = {
    NATIVE: {"prompts": [[1, 2, 3]]},
    TRL: {"prompts": [[1, 2, 3]]},
    TEXT: {"prompt": [1, 2, 3]},
    TOKENS: {"messages": USER, "tokens": [1, 2, 3]},
    VLLM: {"token_ids": [1, 2, 3], "sampling_params": {}},
    CHAT: {"messages": USER},
    TRL_CHAT: {"messages": [USER]},
    SCORE: {"sequences": [[1, 2, 3]]},
    TRL_SCORE: {"sequences": [[1, 2, 3]], "prompt_lengths": [1], "top_logprobs": 2},
    TOKENIZE: {"prompt": "hi"},
    DETOKENIZE: {"tokens": [1, 2]},
}
PLACE = {"offset": 0, "length": 1}
CONTEXT = 64
HUGE = 2**70
VOCABULARY = len(server_tokenizer())


def with_ids(path: str, ids: Any) -> dict[str, Any]:
    """The dialect's good body with other ids for its one prompt."""
    match path:
        case "/v1/sample" | "/generate/":
            return {**GOOD[path], "prompts": [ids]}
        case "/v1/completions":
            return {**GOOD[path], "prompt": [ids]}
        case "/v1/score" | "/get_sequence_logprobs/":
            return {**GOOD[path], "sequences": [ids]}
        case "/inference/v1/generate":
            return {**GOOD[path], "token_ids": ids}
        case _:
            return {**GOOD[path], "tokens": ids}


async def check_refused(path: str, content: Any, expected: tuple[str, ...], status: int = 400) -> dict[str, Any]:
    """Send it twice; a good request follows. Returns the error object."""
    engine = scripted_engine("ok<|im_end|>", context_length=CONTEXT)
    app = make_app(engine, limits=ServerLimits(max_n=64, max_prompts=8, max_queued=256))
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    async with asgi_client(app, **{"Content-Type": "application/json"}) as client:
        times_s = []
        for _ in range(2):
            start_s = time.process_time()
            answer = await client.post(path, content=body)
            times_s.append(time.process_time() - start_s)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        for words in expected:
            assert words in error["message"]
        assert len(error["message"]) < 1000
        assert min(times_s) < 0.1
        await check_untouched(engine, client, path)
    return error


async def check_untouched(engine: ScriptedEngine, client: httpx.AsyncClient, path: str) -> None:
    assert engine.requests == []
    assert "unbroken_completions_in_flight 0.0" in (await client.get("/metrics")).text
    assert (await client.post(path, json=GOOD[path])).status_code == 200


WITH_IDS = (NATIVE, TRL, TEXT, TOKENS, VLLM)
SCORED = (SCORE, TRL_SCORE)


@pytest.mark.parametrize("path", WITH_IDS)
@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([], ("at least one id",)),
        ([1, -1], ("must be greater than or equal to 0", "-1")),
        ([1, VOCABULARY], (f"[0, {VOCABULARY})", f"got {VOCABULARY} at position 1")),
        ([1, 2**31], ("must be less than 2147483648", "2147483648")),
        ([1, HUGE], (str(HUGE),)),
        ([1, "2"], ("'2'",)),
        ([1, 2.5], ("2.5",)),
        ([1, True], ("True",)),
        ([1, None], ("None",)),
        ([1] * CONTEXT, (f"maximum context length is {CONTEXT} tokens", f"your request has {CONTEXT} input tokens")),
        ([1] * (CONTEXT + 1), (f"maximum context length is {CONTEXT} tokens", f"has {CONTEXT + 1} input tokens")),
    ],
    ids=["none", "negative", "vocabulary", "int32", "huge", "text", "fraction", "bool", "null", "context", "beyond"],
)
async def test_ids_that_no_model_takes(path: str, ids: list[Any], expected: tuple[str, ...]) -> None:
    error = await check_refused(path, with_ids(path, ids), expected)
    assert (error["code"] == "context_length_exceeded") == (len(ids) >= CONTEXT)


@pytest.mark.parametrize("path", SCORED)
@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([-1, 1], ("greater than or equal to 0", "-1")),
        ([1, VOCABULARY], (f"[0, {VOCABULARY})",)),
        ([1] * (CONTEXT + 1), (f"got {CONTEXT + 1}",)),
        ([1, "2"], ("'2'",)),
    ],
)
async def test_ids_that_cannot_be_scored(path: str, ids: list[Any], expected: tuple[str, ...]) -> None:
    await check_refused(path, with_ids(path, ids), expected)


async def test_a_prompt_one_short_of_the_context_is_continued() -> None:
    async with asgi_client(make_app(scripted_engine("ok", context_length=CONTEXT))) as client:
        for path in WITH_IDS:
            answer = await client.post(path, json=with_ids(path, [1] * (CONTEXT - 1)))
            assert answer.status_code == 200, answer.text


async def test_no_prompts_are_empty_lists_for_trl() -> None:
    async with asgi_client(make_app(scripted_engine("ok"))) as client:
        generated = (await client.post(TRL, json={"prompts": []})).json()
        assert (generated["prompt_ids"], generated["completion_ids"], generated["logprobs"]) == ([], [], [])
        scored = (await client.post(TRL_SCORE, json={"sequences": [], "prompt_lengths": []})).json()
        assert scored["logprobs"] == []


MIXED = "not a mixture"
CASES: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    # prompts
    (NATIVE, {"prompts": []}, ("prompts must hold at least one prompt",)),
    (TEXT, {"prompt": []}, ("prompt must hold at least one prompt",)),
    (NATIVE, {"prompts": ["a", [1]]}, ("prompts must be", MIXED)),
    (TRL, {"prompts": ["a", [1]]}, ("prompts must be", MIXED)),
    (TEXT, {"prompt": ["a", [1]]}, ("prompt must be", MIXED)),
    (TEXT, {"prompt": ["a", 1]}, ("prompt must be", MIXED)),
    (TEXT, {"prompt": {"a": 1}}, ("prompt must be", "{'a': 1}")),
    (TRL, {"prompts": "a"}, ("prompts must be", "'a'")),
    (TRL, {"prompts": [1, 2]}, ("prompts must be", "[1, 2]")),
    (TRL, {}, ("prompts is required",)),
    (NATIVE, {"prompts": [[1]] * 9}, ("at most 8 prompts", "got 9")),
    (TRL, {"prompts": [[1]] * 9}, ("at most 8 prompts", "got 9")),
    # more than the limit are counted before any is looked at
    (NATIVE, {"prompts": [*[[1]] * 8, ["x"]]}, ("at most 8 prompts (max_prompts), got 9",)),
    (NATIVE, {"prompts": [*["a"] * 8, 1]}, ("at most 8 prompts (max_prompts), got 9",)),
    (TRL, {"prompts": [*[[1]] * 8, ["x"]]}, ("at most 8 prompts (max_prompts), got 9",)),
    (TEXT, {"prompt": [*[[1]] * 8, ["x"]]}, ("at most 8 prompts (max_prompts), got 9",)),
    (SCORE, {"sequences": [*[[1]] * 8, ["x"]]}, ("at most 8 prompts (max_prompts), got 9",)),
    (TRL_SCORE, {"sequences": [*[[1]] * 8, ["x"]], "prompt_lengths": []}, ("at most 8 prompts", "got 9")),
    (NATIVE, {"prompts": [[1], [1] * CONTEXT]}, ("prompts[1]", f"{CONTEXT} input tokens")),
    (SCORE, {"sequences": [[1, 2], []]}, ("sequences[1]", "got 0")),
    (TRL_SCORE, {"sequences": [[1, 2]], "prompt_lengths": []}, ("prompt_lengths", "got 0 for 1")),
    (TRL_SCORE, {"sequences": [[1, 2]], "prompt_lengths": [3]}, ("prompt_lengths[0]", "[1, 2]", "got 3")),
    (TRL_SCORE, {**GOOD[TRL_SCORE], "response_format": "xml"}, ("response_format", "'xml'")),
    # numbers
    (NATIVE, {**GOOD[NATIVE], "n": 65}, ("n must lie in [1, 64]", "65")),
    (NATIVE, {"prompts": [[1]] * 8, "n": 64}, ("at most 256 completions (max_queued)", "512")),
    (TRL, {**GOOD[TRL], "n": 0}, ("n must lie in [1, 64]", "0")),
    (TEXT, {**GOOD[TEXT], "n": HUGE}, (f"n must lie in [1, 64], got {HUGE}",)),
    (TEXT, {**GOOD[TEXT], "max_tokens": 2**62}, ("max_tokens must be", str(2**62))),
    (TEXT, {**GOOD[TEXT], "max_tokens": "5"}, ("max_tokens must be a valid integer", "'5'")),
    (VLLM, {"token_ids": [1], "sampling_params": {"temperature": -1}}, ("temperature must be", "-1")),
    (VLLM, {"token_ids": [1], "sampling_params": {"top_p": 1.5}}, ("top_p must be", "1.5")),
    (TRL, {**GOOD[TRL], "temperature": "hot"}, ("temperature must be a valid number", "'hot'")),
    (TRL, {**GOOD[TRL], "generation_kwargs": {"seed": "x"}}, ("generation_kwargs.seed must be", "'x'")),
    (TRL, {**GOOD[TRL], "generation_kwargs": {"stop_token_ids": "ab"}}, ("generation_kwargs.stop_token_ids", "'ab'")),
    (CHAT, {**GOOD[CHAT], "stop": ["a", 3]}, ("stop.1 must be a valid string", "3")),
    (CHAT, {**GOOD[CHAT], "stop": 3}, ("stop must be a valid string", "3")),
    (CHAT, {**GOOD[CHAT], "stop": [""]}, ("stop_strings must be",)),
    (CHAT, {**GOOD[CHAT], "stream": "yes"}, ("stream must be a valid boolean", "'yes'")),
    # logprobs
    (NATIVE, {**GOOD[NATIVE], "params": {"num_top_logprobs": 129}}, ("num_top_logprobs", "[0, 128]", "129")),
    (TRL, {**GOOD[TRL], "logprobs": 129}, ("num_top_logprobs", "[0, 128]", "129")),
    (TEXT, {**GOOD[TEXT], "logprobs": 2**31 - 1}, ("num_top_logprobs", "[0, 128]")),
    (CHAT, {**GOOD[CHAT], "logprobs": True, "top_logprobs": 129}, ("num_top_logprobs", "129")),
    (VLLM, {"token_ids": [1], "sampling_params": {"logprobs": 129}}, ("num_top_logprobs", "129")),
    (VLLM, {"token_ids": [1], "sampling_params": {"logprobs": -1}}, ("sampling_params.logprobs must be", "-1")),
    (SCORE, {**GOOD[SCORE], "num_top_logprobs": 129}, ("num_top_logprobs", "129")),
    (TRL_SCORE, {**GOOD[TRL_SCORE], "top_logprobs": 129}, ("num_top_logprobs", "129")),
    (TEXT, {**GOOD[TEXT], "stop": ["x"] * 257}, ("stop_strings must be at most 256 strings", "got 257 of 257")),
    (CHAT, {**GOOD[CHAT], "stop": "x" * 70_000}, ("65536 characters together, got 1 of 70000",)),
    # a form of the text
    (TRL, {**GOOD[TRL], "structured_outputs_regex": ""}, ("regex must be a non-empty string",)),
    (TEXT, {**GOOD[TEXT], "structured_outputs": {"choice": ["a"]}}, ("structured_outputs must not have choice",)),
    (TEXT, {**GOOD[TEXT], "structured_outputs": {"json": 3}}, ("structured_outputs.json must be", "3")),
    (CHAT, {**GOOD[CHAT], "response_format": {"type": "poem"}}, ("response_format", "'poem'")),
    (CHAT, {**GOOD[CHAT], "response_format": {"type": "json_schema"}}, ("json_schema.schema",)),
    # keys that this server cannot follow, and unknown ones where the dialect is strict
    (NATIVE, {**GOOD[NATIVE], "unheard_of": 1}, ("unheard_of is not a known field", "1")),
    (NATIVE, {**GOOD[NATIVE], "params": {"unheard_of": None}}, ("params.unheard_of is not a known field",)),
    (SCORE, {**GOOD[SCORE], "unheard_of": 1}, ("unheard_of is not a known field",)),
    (TRL, {**GOOD[TRL], "generation_kwargs": {"unheard_of": 1}}, ("generation_kwargs must not have unheard_of=1",)),
    (VLLM, {**GOOD[VLLM], "kv_transfer_params": {"a": 1}}, ("kv_transfer_params={'a': 1}",)),
    (VLLM, {**GOOD[VLLM], "priority": 1}, ("priority=1",)),
    (VLLM, {"token_ids": [1], "sampling_params": {"min_tokens": 2}}, ("sampling_params", "min_tokens=2")),
    (VLLM, {"token_ids": [1], "sampling_params": {"unheard_of": 2}}, ("sampling_params", "unheard_of=2")),
    (VLLM, {"token_ids": [1], "sampling_params": 5}, ("sampling_params must be", "5")),
    (VLLM, {"token_ids": [1]}, ("sampling_params is required",)),
    (VLLM, {**GOOD[VLLM], "output_mode": "poem"}, ("output_mode must be 'tokens' or 'text'", "'poem'")),
    (VLLM, {"token_ids": [1], "output_mode": "text", "sampling_params": {"detokenize": False}}, ("detokenize",)),
    (TEXT, {**GOOD[TEXT], "echo": True}, ("echo=True",)),
    (TEXT, {**GOOD[TEXT], "best_of": 3}, ("best_of must be n (1)", "3")),
    (CHAT, {**GOOD[CHAT], "logit_bias": {"5": 1}}, ("logit_bias={'5': 1}",)),
    (CHAT, {**GOOD[CHAT], "tool_choice": "required"}, ("tool_choice must match a function in tools", "'required'")),
    (TOKENS, {**GOOD[TOKENS], "tool_choice": {"type": "function"}}, ("tool_choice must be",)),
    *(
        (CHAT, {**GOOD[CHAT], "chat_template_kwargs": {name: []}}, ("chat_template_kwargs must not have", name))
        for name in ("messages", "tools", "add_generation_prompt", "bos_token", "chat_template")
    ),
    (TRL_CHAT, {**GOOD[TRL_CHAT], "chat_template_kwargs": {"messages": []}}, ("must not have ['messages']",)),
    (TOKENIZE, {"messages": USER, "chat_template_kwargs": {"tools": []}}, ("must not have ['tools']",)),
    # messages
    (CHAT, {"messages": []}, ("at least one message",)),
    (CHAT, {"messages": [3]}, ("messages.0 must be a valid dictionary", "3")),
    (CHAT, {"messages": [{"content": "x"}]}, ("messages[0].role",)),
    (TRL_CHAT, {"messages": USER}, ("messages.0 must be a valid list",)),
    (TRL_CHAT, {"messages": [[]]}, ("at least one message",)),
    (CHAT, {**GOOD[CHAT], "tools": [3]}, ("tools.0 must be a valid dictionary", "3")),
    (CHAT, {**GOOD[CHAT], "tools": "all"}, ("tools must be a valid list", "'all'")),
    # images, of which this server takes none
    (CHAT, {"messages": IMAGE}, ("messages[0].content[0] must not hold an image",)),
    (TOKENS, {**GOOD[TOKENS], "messages": IMAGE}, ("messages[0].content[0] must not hold an image",)),
    (TOKENIZE, {"messages": IMAGE}, ("messages[0].content[0] must not hold an image",)),
    (TRL_CHAT, {"messages": [USER, IMAGE]}, ("messages[1][0].content[0] must not hold an image",)),
    (TRL, {**GOOD[TRL], "images": ["aGk="]}, ("images[0] must not hold an image",)),
    (TRL, {"prompts": [[1], [2]], "images": [None, ["aGk="]]}, ("images[1] must not hold an image",)),
    (TRL, {**GOOD[TRL], "mm_processor_kwargs": {"max_pixels": 9}}, ("mm_processor_kwargs must be left out",)),
    (NATIVE, {**GOOD[NATIVE], "images": [["aGk="]]}, ("images[0] must not hold an image",)),
    (SCORE, {**GOOD[SCORE], "images": [["aGk="]]}, ("images[0] must not hold an image",)),
    (TEXT, {**GOOD[TEXT], "images": ["aGk="]}, ("images=['aGk=']",)),
    (
        VLLM,
        {**GOOD[VLLM], "features": {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [PLACE]}}},
        ("features.mm_hashes.image must not hold an image",),
    ),
    (
        VLLM,
        {**GOOD[VLLM], "content_parts": [{"type": "image_url", "url": "x"}]},
        ("content_parts must not hold an image",),
    ),
    # text and ids
    (TOKENIZE, {}, ("either prompt or messages",)),
    (TOKENIZE, {"prompt": "a", "messages": USER}, ("either prompt or messages",)),
    (DETOKENIZE, {"tokens": [VOCABULARY]}, (f"[0, {VOCABULARY})", str(VOCABULARY))),
    (DETOKENIZE, {"tokens": ["a"]}, ("tokens.0 must be a valid integer", "'a'")),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "expected"), CASES)
async def test_a_field_that_breaks_its_rule_is_named(
    path: str, body: dict[str, Any], expected: tuple[str, ...]
) -> None:
    await check_refused(path, body, expected)


@pytest.mark.parametrize("path", [TEXT, CHAT, TOKENS, VLLM, TOKENIZE, DETOKENIZE])
async def test_another_model_is_not_found(path: str) -> None:
    error = await check_refused(path, {**GOOD[path], "model": "gpt-9"}, ("'gpt-9'", f"'{MODEL}'"), status=404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "the body is required"),
        (bytes(range(256)), "the body must be JSON in UTF-8"),
        (b'{"prompt": "\xff\xfe"}', "the body must be JSON in UTF-8"),
        (b'{"prompt": "\\ud800"}', "the body must be JSON in UTF-8"),
        (b'{"temperature": NaN}', "the body must be JSON in UTF-8"),
        (b'{"temperature": Infinity}', "the body must be JSON in UTF-8"),
        (b'{"temperature": 1e999}', "the body must be JSON in UTF-8"),
        (b"[" * 100_000, "the body must be JSON in UTF-8"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "the body must be JSON in UTF-8"),
        (b"[1, 2]", "the body must be a valid dictionary"),
        (b"null", "the body"),
    ],
    ids=[
        "nothing", "random", "utf8", "surrogate", "nan", "infinity", "overflow", "deep list", "deep object", "list",
        "null",
    ],
)  # fmt: skip
async def test_a_body_that_is_no_json_object(path: str, content: bytes, expected: str) -> None:
    await check_refused(path, content, (expected,))


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        (CHAT, '{"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function": {"name": '
         '"f", "parameters": ', "}}]}"),
        (CHAT, '{"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"a": ', "}}"),
        (CHAT, '{"messages": [{"role": "user", "content": ', "}]}"),
        (CHAT, '{"messages": [{"role": "user", "content": "hi"}], "tool_choice": ', "}"),
        (CHAT, '{"messages": [{"role": "user", "content": "hi"}], "response_format": {"type": "json_schema", '
         '"json_schema": {"schema": ', "}}}"),
        (TEXT, '{"prompt": "a", "structured_outputs": {"json": ', "}}"),
        (TEXT, '{"prompt": ', "}"),
        (VLLM, '{"token_ids": [1], "sampling_params": {"extra_args": ', "}}"),
        (TRL, '{"prompts": [[1]], "generation_kwargs": {"a": ', "}}"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("depth", [250, 990])
async def test_a_value_nested_as_deep_as_json_is_read(path: str, before: str, after: str, depth: int) -> None:
    """Refused, or answered where the depth is still fine; never an error of the server."""
    engine = scripted_engine("ok<|im_end|>")
    async with asgi_client(make_app(engine)) as client:
        body = before + '{"a":' * depth + "{}" + "}" * depth + after
        answer = await client.post(path, content=body.encode(), headers={"Content-Type": "application/json"})
        assert answer.status_code in (200, 400)
        assert (await client.post(path, json=GOOD[path])).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TRL, {**GOOD[TRL], "structured_outputs_regex": "[0-9+"}),
        (TRL, {**GOOD[TRL], "generation_kwargs": {"structured_outputs": {"regex": "[0-9+"}}}),
        (TEXT, {**GOOD[TEXT], "structured_outputs": {"regex": "[0-9+"}}),
        (CHAT, {**GOOD[CHAT], "response_format": {"type": "json_object"}}),
        (VLLM, {"token_ids": [1], "sampling_params": {"structured_outputs": {"json": {"type": "object"}}}}),
        (NATIVE, {**GOOD[NATIVE], "params": {"structured_output": {"regex": "a"}}}),
    ],
)
async def test_an_engine_that_forces_no_form_refuses_by_name(path: str, body: dict[str, Any]) -> None:
    await check_refused(path, body, ("structured_output",))


async def test_defaults_and_nulls_of_keys_that_are_not_followed_are_fine() -> None:
    nulls = dict.fromkeys(("logit_bias", "echo", "suffix", "min_tokens", "bad_words", "chat_template", "unheard_of"))
    defaults = {"min_tokens": 0, "logit_bias": {}, "prompt_logprobs": None, "top_k": -1, "seed": -1}
    async with asgi_client(make_app(scripted_engine("ok<|im_end|>"))) as client:
        for extra in (nulls, defaults):
            for path in (TEXT, CHAT, TOKENS):
                assert (await client.post(path, json={**GOOD[path], **extra})).status_code == 200
            body = {"token_ids": [1], "sampling_params": extra, "features": None, "priority": 0}
            answer = await client.post(VLLM, json=body)
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", WITH_IDS)
async def test_a_long_list_of_bad_ids_is_left_at_the_first(path: str) -> None:
    error = await check_refused(path, with_ids(path, [-1] * 100_000), ("must be greater than or equal to 0, got -1",))
    assert error["param"].endswith(".0")


@pytest.mark.parametrize(
    ("path", "make"),
    [
        (NATIVE, lambda ids: {"params": {"stop_token_ids": ids}}),
        (VLLM, lambda ids: {"sampling_params": {"stop_token_ids": ids}}),
        (TEXT, lambda ids: {"stop_token_ids": ids}),
        (CHAT, lambda ids: {"stop_token_ids": ids}),
        (TOKENS, lambda ids: {"stop_token_ids": ids}),
        (TRL, lambda ids: {"stop_token_ids": ids}),
        (TRL, lambda ids: {"generation_kwargs": {"stop_token_ids": ids}}),
        (TRL_CHAT, lambda ids: {"generation_kwargs": {"stop_token_ids": ids}}),
    ],
)
async def test_a_million_stop_ids_are_as_many_as_differ_and_never_more_than_the_vocabulary(
    path: str, make: Any
) -> None:
    engine, number = scripted_engine("ok<|im_end|>"), 10**6 if path == NATIVE else 10**5  # the others read as it does
    async with asgi_client(make_app(engine)) as client:
        refused = await client.post(path, json={**GOOD[path], **make(list(range(number)))})
        assert refused.status_code == 400
        assert f"stop_token_ids must be at most {engine.vocab_size} ids" in refused.json()["error"]["message"]
        taken = await client.post(path, json={**GOOD[path], **make([5] * number)})
        assert taken.status_code == 200, taken.text
    (request,) = engine.requests
    assert len(request.params.stop_token_ids) <= 5


@pytest.mark.parametrize("piece", [b"[]", b"{}", b'""', b'"]\\"["'])
async def test_a_body_of_more_values_than_anybody_needs_is_refused_before_it_is_parsed(piece: bytes) -> None:
    """`[],` has 3 bytes, and 64 as a list in memory; brackets and quotes in a text are none."""
    number = 2**20
    app = make_app(scripted_engine("ok"))
    async with asgi_client(app, **{"Content-Type": "application/json"}) as client:
        many = await client.post(NATIVE, content=b'{"prompts": [' + piece + (b"," + piece) * number + b"]}")
        assert many.status_code == 400
        assert (
            many.json()["error"]["message"] == f"the body must have at most {number} lists, objects and texts, got more"
        )
        text = b'{"prompt": "' + b'[{\\"' * number + b'"}'
        assert "the body must have" not in (await client.post(TEXT, content=text)).text


async def test_a_compact_body_of_more_arrays_than_prompts_is_refused_before_they_are_made() -> None:
    app = make_app(scripted_engine("ok"), limits=ServerLimits(max_prompts=8))
    body = compact.encode({"prompts": [np.array([1], np.int32)] * 9})
    broken = body.replace(b'["<i4", [1], 64]', b'["<i4", [9], 64]')  # the ninth has no such bytes
    assert broken != body
    async with asgi_client(app, **{"Content-Type": compact.MEDIA_TYPE}) as client:
        for content in (body, broken):
            answer = await client.post(NATIVE, content=content)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"] == "a compact body may have at most 8 arrays, got more"
    with pytest.raises(InvalidInputError, match="an array ends at byte 100 of a body of"):
        compact.decode(broken)
