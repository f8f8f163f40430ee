"""What a dialect asks and gets: the question, the turn, and the reader of its reply."""

import functools
from typing import Any

import pytest
from fastapi import Request
from hypothesis import given
from hypothesis import strategies as st

from support.servers import asgi_client, encode, make_app, scripted_engine, server_tokenizer
from unbroken.counters import Counters
from unbroken.rendering.base import PartKind
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.rendering.template import TemplateRenderer
from unbroken.server.app import create_app
from unbroken.server.config import ServerConfig
from unbroken.server.context import ServerContext
from unbroken.server.http.access import Access, Routes
from unbroken.server.questions import PlainTurns
from unbroken.server.turns import OpenTurn, Question
from unbroken.server.wire.openai import StopCutter
from unbroken.server.wire.reply import ReplyReader

CHAT = "/v1/chat/completions"
USER: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


class RecordingTurns(PlainTurns):
    """Keeps what was asked."""

    def __init__(self, context: ServerContext) -> None:
        super().__init__(context)
        self.questions: list[Question] = []
        self.closed = False

    async def open(self, request: Request, question: Question, *, id_prefix: str) -> OpenTurn:
        self.questions.append(question)
        return await super().open(request, question, id_prefix="mine-")

    async def close(self) -> None:
        self.closed = True


def make_recording_app() -> Any:
    return create_app(
        scripted_engine("ok<|im_end|>"),
        lambda options: TemplateRenderer(server_tokenizer(), template_kwargs=options),
        TextCodec(server_tokenizer()),
        ServerConfig(model_name="tiny"),
        make_turns=RecordingTurns,
        more_routers=[more()],
    )


def more() -> Routes:
    router = Routes(Access.OPEN)

    @router.get("/more")
    async def answer() -> str:
        return "more"

    return router


async def test_another_opener_answers_and_more_routers_are_routed() -> None:
    app = make_recording_app()
    async with app.router.lifespan_context(app), asgi_client(app) as client:
        answer = (await client.post(CHAT, json={"messages": USER, "tools": TOOLS, "temperature": 0.5})).json()
        assert (await client.get("/more")).json() == "more"
    (question,) = app.state.context.turns.questions
    assert answer["id"].startswith("mine-")
    assert question.messages == USER
    assert question.tools == TOOLS
    assert question.reads_calls
    assert question.sampling.temperature == 0.5
    assert app.state.context.turns.closed


async def test_a_retry_is_told_by_its_bytes_its_path_and_its_headers() -> None:
    app = make_recording_app()
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    async with asgi_client(app) as client:
        for path, content, headers in (
            (CHAT, body, {}),
            (CHAT, body, {"x-stainless-retry-count": "1", "idempotency-key": "k"}),
            (CHAT, body + b" ", {"x-stainless-retry-count": "many"}),
        ):
            await client.post(path, content=content, headers={"content-type": "application/json", **headers})
    first, retry, other = (question.retry for question in app.state.context.turns.questions)
    assert (first.retry_count, first.idempotency_key) == (None, None)
    assert (retry.retry_count, retry.idempotency_key) == (1, "k")
    assert other.retry_count is None
    assert first.body_sha256 == retry.body_sha256 != other.body_sha256


@functools.cache
def renderer() -> TemplateRenderer:
    return TemplateRenderer(server_tokenizer())


def open_reader(*stops: str, name: str = "answer/0") -> ReplyReader:
    return ReplyReader(
        renderer=renderer(),
        prompt_ids=renderer().render(USER).token_ids,
        tools=TOOLS,
        reads_calls=True,
        codec=TextCodec(server_tokenizer()),
        cutter=StopCutter(stops),
        events=Counters(),
        name=name,
    )


def test_pieces_come_in_the_order_of_the_model_whatever_the_chunks() -> None:
    ids = encode(f"<think>\nhm\n</think>\n\nFirst E\n{CALL}\nthen{CALL}<|im_end|>")
    for size in (1, 3, len(ids)):
        reader = open_reader("END")
        pieces = [piece for k in range(0, len(ids), size) for piece in reader.feed(ids[k : k + size])]
        pieces += reader.close()
        joined: list[list[Any]] = []
        for piece in pieces:
            if joined and piece.call is None and joined[-1][0] is piece.kind:
                joined[-1][1] += piece.text
            else:
                joined.append([piece.kind, piece.text])
        assert joined == [
            [PartKind.REASONING, "hm"],
            [PartKind.CONTENT, "First E"],
            [PartKind.TOOL_CALL, ""],
            [PartKind.CONTENT, "\nthen"],
            [PartKind.TOOL_CALL, ""],
        ]
        assert (reader.reasoning, reader.content, len(reader.calls)) == ("hm", "First E\nthen", 2)


THOUGHT = "<think>\n9.11 and 9.8, so song one\n</think>\n\nAnswer 9.8<|im_end|>"
SONG = "9.11 and 9.8, so song one"


@pytest.mark.parametrize(
    ("stop", "reasoning", "content"),
    [
        ("song", "9.11 and 9.8, so", ""),
        ("ong on", "9.11 and 9.8, so s", ""),
        ("one\n</think>\n\nAns", "9.11 and 9.8, so song ", ""),
        ("</think>", SONG, ""),
        ("\n\nAns", SONG, ""),
        ("nk>\n\nAnswer", SONG, ""),
        ("Answer", SONG, ""),
        ("swer", SONG, "An"),
        ("8<|im_end|>", SONG, "Answer 9."),
        ("er 9.9", SONG, "Answer 9.8"),
        ("<think>", "", ""),
    ],
)
def test_a_stop_string_ends_the_reply_wherever_it_is_in_the_sampled_text(
    stop: str, reasoning: str, content: str
) -> None:
    ids = encode(THOUGHT)
    for size in (1, 2, len(ids)):
        reader = open_reader(stop)
        pieces = [piece for k in range(0, len(ids), size) for piece in reader.feed(ids[k : k + size])]
        pieces += reader.close()
        for kind, text in ((PartKind.REASONING, reasoning), (PartKind.CONTENT, content)):
            assert "".join(piece.text for piece in pieces if piece.kind is kind) == text
        assert (reader.reasoning, reader.content) == (reasoning, content)
        assert reader.stop_string == (stop if stop in THOUGHT else None)
        assert (reader.parsed.reasoning, reader.parsed.content) == (SONG, "Answer 9.8")


TEXTS = "ab\u00e9\U0001f600 \n</"


@given(st.text(TEXTS, max_size=30), st.text(TEXTS, min_size=1, max_size=4))
def test_a_reply_of_plain_text_is_the_text_before_the_stop_string(text: str, stop: str) -> None:
    before, found, _ = text.partition(stop)
    reader = open_reader(stop)
    reader.feed(encode(text))
    reader.close()
    assert (reader.content, reader.stop_string) == (before, found or None)


@pytest.mark.parametrize("stop", ["</tool_call>", "}\n</tool_call>", "1}}"])
def test_a_stop_string_that_ends_a_call_does_not_undo_it(stop: str) -> None:
    reader = open_reader(stop)
    reader.feed(encode(CALL))
    reader.close()
    assert [call.name for call in reader.calls] == ["add"]
    assert (reader.content, reader.stop_string, reader.list_malformed()) == ("", stop, [])


def test_a_stop_string_within_a_call_leaves_a_call_that_failed() -> None:
    reader = open_reader('"arguments')
    reader.feed(encode(CALL.partition('ents"')[0] + "ents"))  # an engine stops here
    reader.close()
    assert not reader.calls
    assert reader.content == CALL.partition('"arguments')[0]
    assert [call["status"] for call in reader.list_malformed()] == ["unclosed"]


def test_the_ids_of_calls_are_those_of_the_answer() -> None:
    found = []
    for name in ("answer/0", "answer/0", "answer/1"):
        reader = open_reader(name=name)
        reader.feed(encode(CALL + CALL + "<|im_end|>"))
        reader.close()
        found.append([call.call_id for call in reader.calls])
    assert found[0] == found[1]
    assert len({*found[0], *found[2]}) == 4
    assert all(len(call_id) == 9 and call_id.isalnum() for ids in found for call_id in ids)


async def test_the_same_question_has_other_call_ids_each_time() -> None:
    async with asgi_client(make_app(scripted_engine(CALL + "<|im_end|>"))) as client:
        body = {"messages": USER, "tools": TOOLS, "n": 2}
        choices = (await client.post(CHAT, json=body)).json()["choices"]
        choices += (await client.post(CHAT, json=body)).json()["choices"]
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 4
