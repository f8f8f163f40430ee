"""Gemini's generateContent: what its clients send, and what they need back."""

import asyncio
import base64
from typing import Any

import pytest

from support.dialects import GEMINI, join_answers, read_answers, without_ids
from support.image_servers import image_file, in_base64, make_vision_app, vision_engine
from support.servers import MODEL, asgi_client, close_soon, encode, make_app, scripted_engine, server_tokenizer
from unbroken.engines.scripted import ScriptedEngine
from unbroken.server.wire.conversation import make_seal
from unbroken.server.wire.gemini import _convert_schema, make_signature

STREAM = GEMINI.replace(":generate", ":streamGenerate")
COUNT = GEMINI.replace(":generateContent", ":countTokens")
USER = [{"role": "user", "parts": [{"text": "hi"}]}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
DECLARED = {
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}}},
}
TOOLS = [{"functionDeclarations": [DECLARED]}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "add", oops\n</tool_call>'
REPLY = f"<think>\nhm é😀\n</think>\n\nLet me  see.\n\n{CALL}\n{CALL}<|im_end|>"
THOUGHTS = {"thinkingConfig": {"includeThoughts": True}}


async def ask(reply: str, engine: ScriptedEngine | None = None, **fields: Any) -> dict[str, Any]:
    """A whole answer, which its stream must equal."""
    body = {"contents": USER, **fields}
    async with asgi_client(make_app(engine or scripted_engine(reply))) as client:
        answer = await client.post(GEMINI, json=body)
        assert answer.status_code == 200, answer.text
        whole: dict[str, Any] = answer.json()
        assert without_ids(join_answers(await read_answers(client, body))) == without_ids(whole)
    return whole


def get_parts(answer: dict[str, Any]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = answer["candidates"][0]["content"]["parts"]
    return parts


async def refused(body: dict[str, Any], *, path: str = GEMINI, **config: Any) -> dict[str, Any]:
    """The error of a request, in Google's form."""
    engine = scripted_engine(REPLY, takes_structured_output=True)
    async with asgi_client(make_app(engine, **config)) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code >= 400, answer.text
    assert engine.requests == []
    error: dict[str, Any] = answer.json()["error"]
    assert error["code"] == answer.status_code
    return error


async def get_ids(**fields: Any) -> list[int]:
    """The ids of a request's prompt."""
    engine = scripted_engine("ok<|im_end|>")
    await ask("", engine, **fields)
    ids: list[int] = engine.requests[0].prompt_ids.tolist()
    return ids


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


def model(*parts: Any) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def call(**fields: Any) -> dict[str, Any]:
    return {"functionCall": {"name": "add", "args": {"a": 1}, **fields}}


def response(**fields: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": "add", "response": {"output": "3"}, **fields}}


async def test_a_reply_is_thoughts_text_and_calls_in_their_order() -> None:
    answer = await ask(REPLY, tools=TOOLS, generationConfig=THOUGHTS)
    thought, text, first, second = get_parts(answer)
    assert thought == {"text": "hm é😀", "thought": True}
    assert text == {"text": "Let me  see.", "thoughtSignature": make_signature("hm é😀")}
    assert [one["functionCall"]["args"] for one in (first, second)] == [{"a": 1}, {"a": 1}]
    assert first["functionCall"]["id"] != second["functionCall"]["id"]
    assert answer["candidates"][0]["finishReason"] == "STOP"
    assert answer["candidates"][0]["content"]["role"] == "model"
    usage = answer["usageMetadata"]
    assert usage["candidatesTokenCount"] == len(encode(REPLY))
    assert usage["totalTokenCount"] == usage["promptTokenCount"] + usage["candidatesTokenCount"]
    assert answer["policy_versions"] == [[0, len(encode(REPLY)), 0]]
    assert answer["modelVersion"] == MODEL


async def test_thoughts_that_were_not_asked_for_are_in_the_signature_only() -> None:
    text, *_ = get_parts(await ask(REPLY, tools=TOOLS))
    assert text == {"text": "Let me  see.", "thoughtSignature": make_signature("hm é😀")}


@pytest.mark.parametrize(
    ("reply", "fields", "reason", "text"),
    [
        ("ok<|im_end|>", {}, "STOP", "ok"),
        ("<|im_end|>", {}, "STOP", ""),
        ("one two three<|im_end|>", {"generationConfig": {"maxOutputTokens": 2}}, "MAX_TOKENS", None),
        ("a END b<|im_end|>", {"generationConfig": {"stopSequences": ["no", "END"]}}, "STOP", "a "),
        (f"{BROKEN}<|im_end|>", {"tools": TOOLS}, "MALFORMED_FUNCTION_CALL", BROKEN),
        (f"{BROKEN}\n{CALL}<|im_end|>", {"tools": TOOLS}, "STOP", None),
        (BROKEN, {"tools": TOOLS, "generationConfig": {"maxOutputTokens": 9}}, "MAX_TOKENS", None),
        (
            f"{CALL}<|im_end|>",
            {"tools": TOOLS, "toolConfig": {"functionCallingConfig": {"mode": "NONE"}}},
            "STOP",
            CALL,
        ),
    ],
)
async def test_an_answer_says_why_it_ended(reply: str, fields: dict[str, Any], reason: str, text: str | None) -> None:
    answer = await ask(reply, **fields)
    (candidate,) = answer["candidates"]
    assert candidate["finishReason"] == reason
    assert ("finishMessage" in candidate) == (reason == "MALFORMED_FUNCTION_CALL")
    if text is not None:
        assert get_parts(answer) == [{"text": text}]


async def test_a_reply_that_is_only_reasoning_has_its_signature() -> None:
    for config, shown in (({}, []), (THOUGHTS, [{"text": "hm", "thought": True}])):
        answer = await ask("<think>\nhm", generationConfig={**config, "maxOutputTokens": len(encode("<think>\nhm"))})
        end = {"text": "", "thought": True, "thoughtSignature": make_signature("hm")}
        assert get_parts(answer) == [*shown, end]


async def test_reasoning_comes_back_by_thoughts_by_signature_or_by_both() -> None:
    """gemini-cli drops the thoughts and keeps the signature; a chat of the SDK keeps both, a content for each chunk."""
    thought, text = {"text": "hm é😀", "thought": True}, {"text": "Well.", "thoughtSignature": make_signature("hm é😀")}
    urlsafe = {**text, "thoughtSignature": text["thoughtSignature"].replace("+", "-").replace("/", "_")}
    histories = (
        [model(thought, {"text": "Well."})],
        [model(text)],
        [model(thought, text)],
        [model(urlsafe)],
        [
            model({"text": "hm ", "thought": True}),
            model({"text": "é😀", "thought": True}),
            model(text),
            model({"text": ""}),
        ],
        [model(thought, {"text": "Well.", "thoughtSignature": base64.b64encode(b"of another server").decode()})],
        [model(thought, {"text": "Well.", "thoughtSignature": "no base64"})],
    )
    # Templates write the reasoning of the turns since the last question.
    rest = [model(call()), user(response())]
    prompts = [await get_ids(contents=[*USER, *history, *rest]) for history in histories]
    assert prompts == [prompts[0]] * len(histories)
    assert "hm é😀" in server_tokenizer().decode(prompts[0])


async def test_a_response_answers_the_call_of_its_id_or_the_next_of_its_name() -> None:
    other = {"functionCall": {"name": "now"}}
    now = {"functionResponse": {"name": "now", "response": {"output": "noon"}}}
    first, second = ({"response": {"output": text}} for text in ("1", "2"))
    by_id = [
        *USER, model(call(id="c1"), {"functionCall": {"name": "now", "id": "c2"}}, call(id="c3")),
        user(response(id="c3", **second), response(id="c2", name="now", response={"output": "noon"}),
             response(id="c1", **first)),
    ]  # fmt: skip
    by_name = [*USER, model(call(), other, call()), user(response(**first), now, response(**second))]
    async with asgi_client(make_app(engine := scripted_engine("ok<|im_end|>"))) as client:
        for contents in (by_id, by_name):
            answer = await client.post(GEMINI, json={"contents": contents})
            assert answer.status_code == 200, answer.text
    text = [server_tokenizer().decode(request.prompt_ids) for request in engine.requests]
    assert [part.count("<tool_response>") for part in text] == [3, 3]
    assert text[1].index("\n1\n") < text[1].index("\nnoon\n") < text[1].index("\n2\n")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"output": "plain"}, "plain"),
        ({"output": {"a": "é"}}, '{"a": "é"}'),
        ({"error": "broke"}, "broke"),
        ({"result": 5}, '{"result": 5}'),
        ({"output": "x", "error": "y"}, '{"output": "x", "error": "y"}'),
        (None, ""),
    ],
)
async def test_a_response_is_its_output_its_error_or_all_of_it(given: Any, text: str) -> None:
    ids = await get_ids(contents=[*USER, model(call()), user(response(response=given))])
    assert f"<tool_response>\n{text}\n</tool_response>" in server_tokenizer().decode(ids)


async def test_sampling_parameters_reach_the_engine() -> None:
    engine = scripted_engine("ok<|im_end|>")
    config = {
        "temperature": 0.5, "topP": 0.9, "topK": 7.0, "stopSequences": ["x"], "maxOutputTokens": 12, "seed": 4,
        "presencePenalty": 0.1, "frequencyPenalty": 0.2, "candidateCount": 1, "responseModalities": ["TEXT"],
    }  # fmt: skip
    await ask("", engine, generationConfig=config)
    params = engine.requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 7, 12)
    assert (params.stop_strings, params.seed) == (("x",), 4)
    assert (params.presence_penalty, params.frequency_penalty) == (0.1, 0.2)


async def test_max_output_tokens_beyond_the_context_are_what_fits() -> None:
    engine = scripted_engine(lambda prompt_ids: [9] * 4000, context_length=128)
    answer = await ask("", engine, generationConfig={"maxOutputTokens": 32000})
    assert answer["candidates"][0]["finishReason"] == "MAX_TOKENS"
    assert answer["usageMetadata"]["totalTokenCount"] == 128


async def test_names_in_snake_case_and_single_objects_ask_for_the_same() -> None:
    in_camel = {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": [user({"text": "hi"})],
        "tools": [{"functionDeclarations": [{"name": "a_b", "parametersJsonSchema": {"properties": {"x_y": {}}}}]}],
        "generationConfig": {"maxOutputTokens": 3},
    }
    in_snake = {
        "system_instruction": {"parts": {"text": "Be brief."}},
        "contents": {"parts": {"text": "hi"}},
        "tools": {"function_declarations": [{"name": "a_b", "parameters_json_schema": {"properties": {"x_y": {}}}}]},
        "generation_config": {"max_output_tokens": 3},
    }
    assert (ids := await get_ids(**in_camel)) == await get_ids(**in_snake)
    assert "x_y" in server_tokenizer().decode(ids)


def test_a_schema_in_googles_form_is_a_json_schema() -> None:
    schema = {
        "type": "OBJECT",
        "propertyOrdering": ["type", "any_of"],
        "properties": {
            "any_of": {
                "type": "ARRAY",
                "minItems": "1",
                "items": {"type": "STRING", "nullable": True, "max_length": 3},
            },
            "type": {"any_of": [{"type": "INTEGER", "format": "int64"}, {"type": "STRING", "enum": ["A", "B"]}]},
            "kind": {"type": "STRING", "enum": ["A"], "nullable": True},
        },
        "required": ["type"],
    }
    converted = _convert_schema(schema)
    assert list(converted["properties"]) == ["type", "any_of", "kind"]
    assert converted == {
        "type": "object",
        "properties": {
            "type": {"anyOf": [{"type": "integer", "format": "int64"}, {"type": "string", "enum": ["A", "B"]}]},
            "any_of": {"type": "array", "minItems": 1, "items": {"type": ["string", "null"], "maxLength": 3}},
            "kind": {"anyOf": [{"type": "string", "enum": ["A"]}, {"type": "null"}]},
        },
        "required": ["type"],
    }


async def test_parameters_in_both_forms_are_the_same_tool() -> None:
    in_json = [{"functionDeclarations": [{"name": "add", "description": "Add.", "parametersJsonSchema": SCHEMA}]}]
    assert await get_ids(tools=TOOLS) == await get_ids(tools=in_json)


async def test_what_this_server_does_not_have_is_left_out_and_named() -> None:
    body = {
        "contents": USER,
        "tools": [*TOOLS, {"googleSearch": {}}, {"codeExecution": {}}],
        "safetySettings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
        "generationConfig": {"mediaResolution": "MEDIA_RESOLUTION_LOW"},
    }
    async with asgi_client(make_app(engine := scripted_engine("ok<|im_end|>"))) as client:
        answer = await client.post(GEMINI, json=body)
        assert answer.status_code == 200, answer.text
    assert set(answer.headers["x-unbroken-ignored"].split(", ")) == {
        "safetySettings", "generationConfig.mediaResolution", "tools.1.googleSearch", "tools.2.codeExecution",
    }  # fmt: skip
    assert engine.requests[0].prompt_ids.tolist() == await get_ids(tools=TOOLS)


async def test_a_budget_of_no_thoughts_is_an_option_of_templates_that_know_it() -> None:
    plain = server_tokenizer().apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, enable_thinking=False, return_dict=True
    )["input_ids"]
    assert await get_ids(generationConfig={"thinkingConfig": {"thinkingBudget": 0}}) == plain


SEALED = make_signature("hm")
CHANGED = base64.b64encode(make_seal("hm", packed=True).replace(".", ".0", 1).encode()).decode()
IMAGE = {"inlineData": {"mimeType": "image/png", "data": "AAAA"}}
CALLING = "toolConfig.functionCallingConfig"


def calling(**config: Any) -> dict[str, Any]:
    return {"tools": TOOLS, "toolConfig": {"functionCallingConfig": config}}


def config(**fields: Any) -> dict[str, Any]:
    return {"generationConfig": fields}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"contents": []}, "messages must hold at least one message"),
        ({"contents": [user()]}, "contents.0.parts must have at least one part, got none"),
        ({"contents": [{"role": "system", "parts": []}]}, "contents.0.role must be 'user', 'model' or 'function'"),
        (
            {"contents": [user({})]},
            "contents.0.parts.0 must have exactly one of text, inlineData, fileData, functionCall",
        ),
        ({"contents": [user({"text": "x", **IMAGE})]}, "got ['text', 'inlineData']"),
        ({"contents": [user({"executableCode": {"code": "x"}})]}, "(this server runs no tools)"),
        ({"contents": [user({"text": "x", "unheardOf": 1})]}, "unheardOf=1 (it is not a known field)"),
        ({"contents": [user(IMAGE)]}, "contents.0.parts.0.inlineData.data must not hold an image"),
        ({"contents": [user({"inlineData": {"mimeType": "audio/wav", "data": ""}})]}, "mimeType must be an image's"),
        ({"contents": [user(call())]}, "must not be of the type 'functionCall' in a message of the role 'user'"),
        ({"contents": [user({"text": "x", "thought": True})]}, "must not be of the type 'thought'"),
        ({"contents": [*USER, model(IMAGE), *USER]}, "contents.1.parts.0 must not be of the type 'inlineData'"),
        ({"contents": [*USER, model(response()), *USER]}, "must not be of the type 'functionResponse'"),
        ({"contents": [user(response())]}, "functionResponse must have the id of an earlier functionCall, or the name"),
        ({"contents": [*USER, model(call()), user(response(), response())]}, "has no response yet, got the name 'add'"),
        ({"contents": [user(response(id="none"))]}, "functionResponse.id must be the id of an earlier functionCall"),
        ({"contents": [*USER, model({"text": "x"})]}, "contents.1 must not be of the role 'model'"),
        (
            {"contents": [*USER, model({"text": "x", "thoughtSignature": CHANGED}), *USER]},
            "contents.1.parts.0.thoughtSignature must come back as this server wrote it",
        ),
        (
            {
                "contents": [
                    *USER,
                    model({"text": "so", "thought": True}, {"text": "x", "thoughtSignature": SEALED}),
                    *USER,
                ]
            },
            "contents.1.parts.1.thoughtSignature must fit the thoughts before it",
        ),
        (
            {"systemInstruction": {"parts": [IMAGE]}},
            "must not be of the type 'inlineData' in a message of the role 'system'",
        ),
        ({"cachedContent": "cachedContents/x"}, "this server keeps no contents"),
        ({"unheardOf": 1}, "the body must not have unheardOf=1 (it is not a known field)"),
        ({"model": "models/other"}, "model must be the one in the path, 'tiny', got 'models/other'"),
        ({"tools": [{"unheardOf": {}}]}, "tools.0 must not have unheardOf"),
        ({"tools": [{"functionDeclarations": [{"description": "x"}]}]}, "functionDeclarations.0.name is required"),
        (
            {"tools": [{"functionDeclarations": [{**DECLARED, "parametersJsonSchema": SCHEMA}]}]},
            "tools.0.functionDeclarations.0.parameters must be left out beside",
        ),
        (calling(mode="VALIDATED"), f"{CALLING}.mode must be 'AUTO', 'NONE' or 'ANY', got 'VALIDATED'"),
        (calling(mode="AUTO", allowedFunctionNames=["add"]), f"{CALLING}.allowedFunctionNames must be left out"),
        (calling(mode="ANY", allowedFunctionNames=["sub"]), f"{CALLING} must match functions in tools (['add'])"),
        ({**calling(mode="ANY"), "tools": []}, f"{CALLING} must match functions in tools ([])"),
        (config(candidateCount=2), "candidateCount=2 (send the request several times)"),
        (config(responseLogprobs=True), "responseLogprobs=True (chat completions have it)"),
        (config(responseModalities=["IMAGE"]), "responseModalities=['IMAGE'] (no answer has it)"),
        (config(responseSchema=SCHEMA), "responseMimeType must be 'application/json'"),
        (config(responseMimeType="text/x.enum"), "or 'text/plain', got 'text/x.enum'"),
        (
            config(responseMimeType="application/json", responseSchema={}, responseJsonSchema={}),
            "generationConfig.responseSchema must be left out beside",
        ),
        (config(topK=2.5), "generationConfig.topK must be a valid integer, got 2.5"),
        (config(maxOutputTokens=0), "maxOutputTokens must be greater than or equal to 1"),
        (config(temperature=-1), "temperature must be"),
        ({"chatTemplateKwargs": {"messages": 1}}, "chat_template_kwargs must not have ['messages']"),
    ],
)
async def test_what_cannot_be_represented_is_refused_by_name(fields: dict[str, Any], expected: str) -> None:
    error = await refused({"contents": USER, **fields})
    assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
    assert expected in error["message"]


async def test_errors_are_in_googles_form_before_the_route_too() -> None:
    assert (await refused({}, api_key="k"))["status"] == "UNAUTHENTICATED"
    other = await refused({"contents": USER}, path=GEMINI.replace(MODEL, "gemini-pro"))
    assert other["status"] == "NOT_FOUND"
    (detail,) = other["details"]
    assert (detail["reason"], detail["metadata"]) == ("model_not_found", {"param": "model"})
    for path in (STREAM, f"{STREAM}?alt=json"):
        assert "alt must be 'sse'" in (await refused({"contents": USER}, path=path))["message"]


@pytest.mark.parametrize("version", ["v1", "v1alpha", "v1beta"])
async def test_each_version_of_the_path_is_answered(version: str) -> None:
    async with asgi_client(make_app(scripted_engine("ok<|im_end|>"))) as client:
        for path in (GEMINI, f"{STREAM}?alt=sse", COUNT):
            answer = await client.post(path.replace("v1beta", version), json={"contents": USER})
            assert answer.status_code == 200, answer.text
            other = await client.post(path.replace("v1beta", "v9"), json={"contents": USER})
            assert "version must be 'v1', 'v1alpha' or 'v1beta'" in other.json()["error"]["message"]
        assert (await client.get(f"/v1/models/{MODEL}")).status_code == 200


@pytest.mark.parametrize(
    ("query", "headers", "status"),
    [
        ("", {"x-goog-api-key": "right"}, 200),
        ("", {"x-goog-api-key": "wrong"}, 401),
        ("?key=right", {}, 200),
        ("?key=wrong", {}, 401),
        ("", {"Authorization": "Bearer right"}, 200),
    ],
)
async def test_the_api_key_may_come_as_googles_clients_send_it(
    query: str, headers: dict[str, str], status: int
) -> None:
    async with asgi_client(make_app(scripted_engine("ok<|im_end|>"), api_key="right")) as client:
        assert (await client.post(GEMINI + query, json={"contents": USER}, headers=headers)).status_code == status


async def test_a_key_in_the_query_opens_no_other_path() -> None:
    async with asgi_client(make_app(scripted_engine("ok<|im_end|>"), api_key="right")) as client:
        assert (await client.get("/v1/models?key=right")).status_code == 401


async def test_an_engine_that_ends_ends_the_stream_with_an_error_event() -> None:
    engine = scripted_engine(lambda prompt_ids: [9] * 4000)

    async with asgi_client(make_app(engine)) as client:
        closing = asyncio.create_task(close_soon(engine))
        events = await read_answers(client, {"contents": USER})
        await closing
    assert "candidates" in events[0]
    assert events[-1]["error"]["status"] == "UNAVAILABLE"


async def test_ids_are_counted_without_sampling() -> None:
    engine = scripted_engine("ok<|im_end|>")
    body = {"contents": USER, "tools": TOOLS, "systemInstruction": {"parts": [{"text": "Be brief."}]}}
    async with asgi_client(make_app(engine)) as client:
        counted = [
            (await client.post(COUNT, json=one)).json()
            for one in (body, {"generateContentRequest": {"model": f"models/{MODEL}", **body}})
        ]
        answered = (await client.post(GEMINI, json=body)).json()
        both = await client.post(COUNT, json={"contents": USER, "generateContentRequest": body})
    assert counted == [{"totalTokens": answered["usageMetadata"]["promptTokenCount"]}] * 2
    assert len(engine.requests) == 1
    assert "contents must be left out" in both.json()["error"]["message"]


async def test_images_come_in_contents_and_in_responses_of_functions() -> None:
    engine = vision_engine("ok<|im_end|>")
    in_urlsafe = in_base64(image_file()).replace("+", "-").replace("/", "_")
    image = {"inlineData": {"mimeType": "image/png", "data": in_urlsafe, "displayName": "x.png"}}
    stored = {"fileData": {"fileUri": f"sha256:{image_file().sha256}"}}
    contents = [user({"text": "x"}, image), model(call()), user(response(parts=[stored]))]
    async with asgi_client(make_vision_app(engine)) as client:
        await client.post("/v1/images", content=image_file().data)
        answer = await client.post(GEMINI, json={"contents": contents})
        assert answer.status_code == 200, answer.text
        broken = await client.post(GEMINI, json={"contents": [user({"text": "x"}, IMAGE)]})
    assert [span.image.sha256 for span in engine.requests[0].images] == [image_file().sha256] * 2
    assert "contents.0.parts.1.inlineData.data" in broken.json()["error"]["message"]


@pytest.mark.parametrize(("allowed", "names"), [(None, ["add", "now"]), (["now"], ["now"])])
async def test_required_calls_are_structured_output(allowed: list[str] | None, names: list[str]) -> None:
    engine = scripted_engine(f"{CALL}<|im_end|>", takes_structured_output=True)
    tools = [{"functionDeclarations": [DECLARED, {"name": "now"}]}]
    await ask("", engine, **{**calling(mode="ANY", allowedFunctionNames=allowed), "tools": tools})
    tag = engine.requests[0].params.structured_output.structural_tag or ""
    assert [name for name in ("add", "now") if f'{name}\\"' in tag] == names


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"responseSchema": {"type": "INTEGER"}}, '{"type": "integer"}'),
        ({"responseJsonSchema": {"type": "integer"}}, '{"type": "integer"}'),
        ({}, '{"anyOf": [{"type": "object"}, {"type": "array"}]}'),
    ],
)
async def test_a_form_of_the_text_is_structured_output(fields: dict[str, Any], expected: str) -> None:
    engine = scripted_engine("1<|im_end|>", takes_structured_output=True)
    await ask("", engine, generationConfig={"responseMimeType": "application/json", **fields})
    assert engine.requests[0].params.structured_output.json_schema == expected


@pytest.mark.parametrize(
    ("name", "status"),
    [
        (f"{MODEL}@latest", 200),
        (f"{MODEL}@0", 200),
        (f"{MODEL}@7", 404),
        ("tinker://run/sampler_weights/s1", 404),
        ("Org/Model", 404),
    ],
)
async def test_the_model_of_the_path_is_a_name_as_in_every_dialect(name: str, status: int) -> None:
    async with asgi_client(make_app(scripted_engine("ok<|im_end|>"))) as client:
        answer = await client.post(f"/v1beta/models/{name}:generateContent", json={"contents": USER})
    assert answer.status_code == status
    assert name in answer.text
