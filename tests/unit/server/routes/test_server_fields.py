"""Every known field of a dialect is followed, refused, or ignored with a warning; one table says which."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import anthropic.types.message_create_params as anthropic_messages
import openai.types.chat.completion_create_params as openai_chat
import openai.types.completion_create_params as openai_completions
import openai.types.responses.response_create_params as openai_responses
import pytest
from pydantic import BaseModel, ConfigDict, Field

from support.servers import asgi_client, make_app, scripted_engine
from unbroken.server.http.ignored import find_ignored, list_models
from unbroken.server.wire import fields

USER = [{"role": "user", "content": "hi"}]
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
GENERATE = "/inference/v1/generate"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER},
    TEXT: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": USER, "max_tokens": 9},
    GENERATE: {"token_ids": [1], "sampling_params": {}},
}
VLLM_0_32 = {  # recorded: importing vLLM takes seconds
    fields.CHAT: "add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template "
    "chat_template_kwargs continue_final_message documents ec_transfer_params echo frequency_penalty ignore_eos "
    "include_reasoning include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids "
    "logprobs max_completion_tokens max_tokens media_io_kwargs messages min_p min_tokens mm_payload "
    "mm_processor_kwargs model n parallel_tool_calls presence_penalty priority prompt_logprobs reasoning_effort "
    "repetition_detection repetition_penalty request_id response_format return_mm_kwargs return_prompt_text "
    "return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start seed session_id "
    "skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options "
    "structured_outputs temperature thinking_token_budget tool_choice tools top_k top_logprobs top_p "
    "truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking",
    fields.COMPLETIONS: "add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params echo "
    "frequency_penalty ignore_eos include_stop_str_in_output kv_transfer_params length_penalty logit_bias "
    "logprob_token_ids logprobs max_tokens min_p min_tokens mm_payload model n presence_penalty priority prompt "
    "prompt_embeds prompt_logprobs repetition_detection repetition_penalty request_id response_format "
    "return_mm_kwargs return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start "
    "seed session_id skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream stream_interval "
    "stream_options structured_outputs suffix temperature thinking_token_budget top_k top_p truncate_prompt_tokens "
    "truncation_side use_beam_search user vllm_xargs watermarking",
    fields.RESPONSES: "background cache_salt chat_template_kwargs ec_transfer_params enable_response_messages "
    "frequency_penalty ignore_eos include include_reasoning include_stop_str_in_output input instructions "
    "kv_transfer_params logit_bias max_output_tokens max_tool_calls media_io_kwargs metadata min_p mm_payload "
    "mm_processor_kwargs model parallel_tool_calls presence_penalty previous_input_messages previous_response_id "
    "priority prompt prompt_cache_key reasoning repetition_penalty request_id return_mm_kwargs seed service_tier "
    "session_id skip_special_tokens stop stop_token_ids store stream structured_outputs temperature text tool_choice "
    "tools top_k top_logprobs top_p truncation user vllm_xargs watermarking",
    fields.MESSAGES: "cache_salt chat_template_kwargs ec_transfer_params kv_transfer_params max_tokens messages "
    "metadata mm_payload model output_config return_mm_kwargs stop_sequences stream system temperature thinking "
    "tool_choice tools top_k top_p vllm_xargs watermarking",
    fields.GENERATE: "cache_salt content_parts ec_transfer_params features kv_transfer_params model output_mode "
    "priority reasoning_ended reasoning_parser_kwargs request_id return_token_ids sampling_params stream "
    "stream_options token_ids token_offsets",
    fields.GENERATE_SAMPLING: "allowed_token_ids bad_words detokenize extra_args flat_logprobs frequency_penalty "
    "ignore_eos include_stop_str_in_output logit_bias logprob_token_ids logprobs max_tokens min_p min_tokens n "
    "output_kind output_text_buffer_length presence_penalty prompt_logprob_start prompt_logprob_token_ids "
    "prompt_logprobs repetition_detection repetition_penalty routed_experts_prompt_start seed skip_clone "
    "skip_reading_prefix_cache skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream_interval "
    "structured_outputs temperature thinking_token_budget top_k top_p trace_decode_token_ids watermarking",
}
GOOGLE_GENAI_3_6 = {  # recorded: what it writes for the Gemini API
    fields.GEMINI: "cachedContent contents continuationToken generationConfig labels model safetySettings serviceTier "
    "store systemInstruction toolConfig tools",
    fields.GEMINI_CONFIG: "audioTranscriptionConfig candidateCount enableEnhancedCivicAnswers frequencyPenalty "
    "imageConfig logprobs maxOutputTokens mediaResolution presencePenalty responseJsonSchema responseLogprobs "
    "responseMimeType responseModalities responseSchema seed speechConfig stopSequences temperature thinkingConfig "
    "topK topP",
    fields.GEMINI_PARTS: "audioMetadata audioTranscription codeExecutionResult documentMetadata executableCode "
    "fileData functionCall functionResponse inlineData mediaProcessing mediaResolution partMetadata speechMetadata "
    "spreadsheetMetadata text thought thoughtSignature toolCall toolResponse videoMetadata",
}
RECORDED = {**VLLM_0_32, **GOOGLE_GENAI_3_6}
SDKS = {
    fields.CHAT: openai_chat.CompletionCreateParamsBase,
    fields.COMPLETIONS: openai_completions.CompletionCreateParamsBase,
    fields.RESPONSES: openai_responses.ResponseCreateParamsBase,
    fields.MESSAGES: anthropic_messages.MessageCreateParamsBase,
}


def load_tool() -> Any:
    path = Path(__file__).parents[4] / "tools/write_field_tables.py"
    spec = importlib.util.spec_from_file_location("write_field_tables", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def list_names(known: fields.Fields) -> tuple[set[str], list[str]]:
    """The fields that are followed, and all others with a reason."""
    (body,) = [body for _, table, body in load_tool().TABLES if table is known]
    others = [name for names in (*known.refused.values(), *known.ignored.values()) for name in names.split()]
    return load_tool().list_names(body), others


async def post(path: str, **extra: Any) -> Any:
    async with asgi_client(make_app(scripted_engine("ok<|im_end|>"))) as client:
        return await client.post(path, json={**BODIES.get(path, {}), **extra})


def test_the_tables_in_the_docs_are_those_of_the_code() -> None:
    tool = load_tool()
    page = tool.PAGE.read_text()
    assert tool.write_page(page) == page, "run `make fields`"


@pytest.mark.parametrize("known", [*RECORDED])
def test_every_field_that_vllm_or_googles_sdk_has_is_followed_refused_or_ignored(known: fields.Fields) -> None:
    followed, others = list_names(known)
    assert set(RECORDED[known].split()) <= followed | set(others)
    assert len(others) == len(set(others))
    assert not followed & set(others)


@pytest.mark.parametrize("known", [*SDKS])
def test_every_field_that_the_sdks_have_is_followed_refused_or_ignored(known: fields.Fields) -> None:
    followed, others = list_names(known)
    assert set(get_type_hints(SDKS[known])) - {"extra_headers"} <= followed | set(others)


@pytest.mark.parametrize(
    ("path", "extra"),
    [
        (CHAT, {"best_of": 3}),
        (CHAT, {"add_generation_prompt": False}),
        (CHAT, {"include_reasoning": False}),
        (CHAT, {"typical_p": 0.5}),
        (CHAT, {"length_penalty": 2.0}),
        (CHAT, {"modalities": ["text", "audio"]}),
        (CHAT, {"vllm_xargs": {"a": 1}}),
        (CHAT, {"priority": 3}),
        (TEXT, {"typical_p": 0.5}),
        (RESPONSES, {"top_logprobs": 3}),
        (MESSAGES, {"mcp_servers": [{}]}),
        (GENERATE, {"reasoning_parser_kwargs": {"a": 1}}),
    ],
)
async def test_a_field_that_would_change_the_answer_is_refused_with_its_reason(path: str, extra: Any) -> None:
    answer = await post(path, **extra)
    error = answer.json()["error"]
    ((name, value),) = extra.items()
    assert (answer.status_code, error["param"]) == (400, name)
    assert f"the body must not have {name}={value} (" in error["message"]


@pytest.mark.parametrize("path", BODIES)
async def test_an_answer_names_the_fields_that_it_ignores(path: str) -> None:
    assert (await post(path, cache_salt="x")).headers["x-unbroken-ignored"] == "cache_salt"
    for answer in [await post(path), await post(path, cache_salt=None)]:
        assert answer.status_code == 200
        assert "x-unbroken-ignored" not in answer.headers


async def test_several_are_named_in_streams_too_and_no_name_can_break_the_header() -> None:
    extra = {"user": "me", "max_tool_calls": 2, "unheard_of": 1, "bad\r\nname": 1, "é": 1, "x" * 999: 1}
    answer = await post(CHAT, stream=True, **extra, chat_template_kwargs={"\u0100": 1})
    assert answer.headers["content-type"].startswith("text/event-stream")
    named = answer.headers["x-unbroken-ignored"].split(", ")
    assert set(named) == {
        "max_tool_calls", "unheard_of", "user", "bad\\r\\nname", "\\u00e9", "x" * 100 + "...",
        "chat_template_kwargs.\\u0100",
    }  # fmt: skip
    answer = await post(RESPONSES, max_tool_calls=2)
    assert answer.headers["x-unbroken-ignored"] == "max_tool_calls"


async def test_the_defaults_of_refused_fields_ask_for_nothing() -> None:
    defaults = {
        "add_generation_prompt": True, "include_reasoning": True, "length_penalty": 1.0, "typical_p": 1,
        "modalities": ["text"], "vllm_xargs": {}, "priority": 0, "skip_special_tokens": True,
    }  # fmt: skip
    answer = await post(CHAT, **defaults)
    assert answer.status_code == 200
    assert "x-unbroken-ignored" not in answer.headers


@pytest.mark.parametrize(
    ("path", "tool", "expected"),
    [
        (CHAT, {"type": "custom", "custom": {"name": "shell"}}, "tools.0 of the type 'custom' is no tool"),
        (CHAT, {"type": "function"}, "tools.0 must have a function with a name"),
        (MESSAGES, {"name": "add"}, "tools.0.input_schema is required"),
    ],
)
async def test_a_tool_whose_calls_could_not_be_read_is_refused(path: str, tool: Any, expected: str) -> None:
    answer = await post(path, tools=[tool])
    assert answer.status_code == 400
    assert expected in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (CHAT, "chat_template_kwargs"), (CHAT, "tools"), (CHAT, "response_format"), (RESPONSES, "metadata"),
        (MESSAGES, "output_config"), (GENERATE, "sampling_params"), (TEXT, "structured_outputs"),
    ],
)  # fmt: skip
async def test_a_field_nested_deeper_than_128_levels_is_refused(path: str, field: str) -> None:
    value: Any = {}
    for _ in range(200):
        value = {"json": value}
    answer = await post(path, **{field: value})
    assert answer.status_code == 400
    assert "the body must be nested in at most 128 levels" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ('{"items":' * 200 + "{}" + "}" * 200, "must be nested in at most 128 levels"),
        ('{"items":' * 5000 + "{}" + "}" * 5000, "must be nested in at most 128 levels"),
        (json.dumps({"enum": ["x" * 2**20]}), "must have at most 1048576 characters, got 1048"),
    ],
)
async def test_a_schema_as_text_has_the_same_limits(schema: str, expected: str) -> None:
    answer = await post(TEXT, structured_outputs={"json": schema})
    assert answer.status_code == 400
    assert expected in answer.json()["error"]["message"]


async def test_template_options_that_would_fill_the_memory_of_renderers_are_refused() -> None:
    answer = await post(CHAT, chat_template_kwargs={"note": "x" * 2**18})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "chat_template_kwargs")
    assert "must have at most 262144 characters as JSON" in error["message"]


@pytest.mark.parametrize(
    ("path", "extra", "expected"),
    [
        (CHAT, {"stream_options": {"include_usage": True, "unheard_of": 1}}, "stream_options.unheard_of"),
        (TEXT, {"stream_options": {"unheard_of": 1}}, "stream_options.unheard_of"),
        (RESPONSES, {"text": {"verbosity": "low", "unheard_of": 1}}, "text.verbosity, text.unheard_of"),
        (RESPONSES, {"reasoning": {"summary": "auto", "unheard_of": 1}}, "reasoning.summary, reasoning.unheard_of"),
        (MESSAGES, {"output_config": {"unheard_of": 1}}, "output_config.unheard_of"),
    ],
)
async def test_keys_of_objects_in_a_body_are_named_if_they_have_no_effect(
    path: str, extra: dict[str, Any], expected: str
) -> None:
    assert (await post(path, **extra)).headers["x-unbroken-ignored"] == expected
    quiet = {field: dict.fromkeys(value) for field, value in extra.items()}  # null asks for nothing
    assert "x-unbroken-ignored" not in (await post(path, **quiet)).headers


@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        ({"function": {"name": 5}}, "must have a function whose name is a text"),
        ({"function": {"name": ""}}, "must have a function whose name is a text"),
        ({"function": 5}, "must have a function whose name is a text"),
        ({"name": 5}, "must have a function whose name is a text"),
        ({}, "must have a function whose name is a text"),
        ({"type": "function", "function": {"name": "f", "parameters": 5}}, "whose parameters is an object"),
        ({"type": "function", "function": {"name": "f", "description": 5}}, "whose description is a text"),
    ],
)
async def test_tools_that_are_no_functions_are_refused_whether_they_have_a_type_or_not(
    tool: dict[str, Any], expected: str
) -> None:
    for path in (CHAT, f"{CHAT}/render", "/tokenize"):
        answer = await post(path, **{**BODIES[CHAT], "tools": [tool]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools.0"), answer.text
        assert expected in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, f"{CHAT}/render"])
@pytest.mark.parametrize(("field", "value"), [("temperature", -1), ("frequency_penalty", 3), ("presence_penalty", -3)])
async def test_what_no_call_can_have_is_refused_where_it_is_rendered_too(path: str, field: str, value: float) -> None:
    answer = await post(path, **{**BODIES[CHAT], field: value})
    assert answer.status_code == 400
    assert f"{field} must be" in answer.json()["error"]["message"]


RENDER = "/v1/chat/completions/render"
OF_TRL: dict[str, dict[str, Any]] = {
    "/generate/": {"prompts": [[1]], "max_tokens": 2},
    "/chat/": {"messages": [USER], "max_tokens": 2},
    "/get_sequence_logprobs/": {"sequences": [[1, 2]], "prompt_lengths": [1]},
    "/detokenize": {"tokens": [1]},
    "/abort_requests": {"request_ids": ["none"]},
}


@pytest.mark.parametrize("path", OF_TRL)
async def test_a_model_that_ignores_keys_has_them_named_by_the_walk_over_the_body(path: str) -> None:
    answer = await post(path, **OF_TRL[path], unheard_of=1, nothing=None)
    assert (answer.status_code, answer.headers["x-unbroken-ignored"]) == (200, "unheard_of")
    assert "x-unbroken-ignored" not in (await post(path, **OF_TRL[path])).headers


@pytest.mark.parametrize("path", [CHAT, RENDER, TEXT])
async def test_keys_inside_a_models_own_objects_are_walked_too(path: str) -> None:
    body = {**BODIES[TEXT if path == TEXT else CHAT], "response_format": {"type": "text", "unheard_of": 1, "no": None}}
    answer = await post(path, **body)
    assert (answer.status_code, answer.headers["x-unbroken-ignored"]) == (200, "response_format.unheard_of")


class One(BaseModel):
    kind: str = Field(default="", alias="sort")
    both: int = 0


class Other(BaseModel):
    inner: list[One] | None = None
    both: int = 0


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    union: One | Other | None = None
    checked: int = 0


def test_in_a_union_a_key_is_ignored_that_no_member_has() -> None:
    (model,) = list_models(Annotated[Strict | None, "of a body"])
    given = {"union": {"sort": 1, "inner": [{"deep": 1}], "both": 1, "none": 1}, "unknown": 1}
    assert find_ignored(given, [model]) == ["union.none"]
    assert find_ignored({"inner": [{"deep": 1, "kind": 2}, {"deep": 1}]}, [Other]) == ["inner.deep"]
    assert find_ignored([1, None], [Other]) == []
