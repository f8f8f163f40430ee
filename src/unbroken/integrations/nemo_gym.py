"""Environments of NeMo Gym: resources servers with tools and a verifier (docs/environments.md); extra `nemo-gym`.

    environment = "unbroken.integrations.nemo_gym:NeMoGymEnv"
    environment_arguments = { url = "http://127.0.0.1:8000", file = "example.jsonl" }

The protocol is that of a resources server of nemo-gym 0.4 to 0.7, as its `simple_agent` uses it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote, urlsplit

from unbroken.errors import EnvServerError, InvalidInputError, RewardError, missing_extra
from unbroken.ledger.numbers import to_finite_float32
from unbroken.messages import ContentPart, Message, ToolSchema, get_reasoning, get_text
from unbroken.reports import shorten
from unbroken.rollout.env import EnvStart, Outcome, Reply
from unbroken.rollout.failures import format_error
from unbroken.rollout.seeds import EpochOrder
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.tools import Tool, ToolOutcome, ToolStatus
from unbroken.types import FinishReason
from unbroken.untrusted import MAX_ANSWER_BYTES, MAX_ROWS_BYTES, read_json, read_text

_STATUSES = {404: ToolStatus.UNKNOWN_TOOL, 422: ToolStatus.INVALID_ARGUMENTS}


class NeMoGymEnv(ToolEnv):
    """An example with its tools, which the server runs, until a reply has no calls. Its verifier gives the reward.

    Each rollout has its own session. The calls of a turn are made one after the other, in order, and their answers
    are the server's, also where it refuses.
    """

    def __init__(
        self,
        url: str,
        file: Path,
        number: int = 0,
        split: str = "train",
        seed: int = 0,
        *,
        evaluation_file: Path | None = None,
        timeout_s: float = 60.0,
        verify_timeout_s: float = 300.0,
    ) -> None:
        """Choose the example: in training one of `file`, in another order in each epoch.

        `timeout_s` is for each answer of the server but that of its verifier. Evaluations take `evaluation_file`, or
        else `file`, in order.

        Raises:
            InvalidInputError: the URL is not valid, or the file has no examples of the right form.
        """
        super().__init__((), (), self._verify)
        is_training = split == "train"
        examples = Examples(file if is_training else evaluation_file or file)
        order = EpochOrder(len(examples), seed=seed, shuffle=is_training)
        self._example = examples[order.index(number)]
        self._session = _ResourcesSession(url, timeout_s=timeout_s, verify_timeout_s=verify_timeout_s)
        self._timeout_s = timeout_s
        self._first = _read_messages(self._example.params, self._example.place)
        self._is_cut = False
        self.add_tools([self._make_tool(schema) for schema in _read_tools(self._example.params, self._example.place)])

    async def start(self) -> EnvStart:
        """Begin the session with the example."""
        await self._session.seed(self._example.row)
        return replace(await super().start(), messages=self._first)

    async def step(self, reply: Reply) -> Outcome:
        """Make the calls of the reply; `Done` without calls, and if it was cut."""
        self._is_cut = reply.finish_reason is FinishReason.LENGTH
        return await super().step(reply)

    async def close(self) -> None:
        """End the session."""
        await self._session.close()

    async def _verify(self, messages: Sequence[Message]) -> float:
        new = messages[len(self._first) :]
        response = _make_response(self._example.params, new, is_cut=self._is_cut)
        return await self._session.verify(self._example.row, response)

    def _make_tool(self, schema: ToolSchema) -> Tool:
        function = functools.partial(self._call_tool, schema["function"]["name"])
        return Tool(function=function, schema=schema, timeout_s=self._timeout_s, checks_arguments=False)

    async def _call_tool(self, name: str, /, **arguments: Any) -> ToolOutcome:
        status, text = await self._session.call(name, arguments)
        failed = _STATUSES.get(status, ToolStatus.ERROR)
        return ToolOutcome(status=ToolStatus.OK if status < 400 else failed, content=text)


_PARAMS = "responses_create_params"
_NUM_FILES = 4
"""Files whose lines are kept: that of training, and those of evaluations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Example:
    """A line of the file."""

    row: Mapping[str, Any]
    """All of it, as the server gets it."""
    place: str
    """The file and the number of the line, for errors."""

    @property
    def params(self) -> Mapping[str, Any]:
        """The parameters of Responses: `input`, `tools`, ..."""
        params: Mapping[str, Any] = self.row[_PARAMS]
        return params


class Examples:
    """The examples of a JSONL file: each line has the parameters of OpenAI's Responses and what the verifier needs.

    {"responses_create_params": {"input": [{"role": "user", "content": "Add 4."}], "tools": [...]}, "expected_count": 7}

    The lines are not read by `datasets`, which gives all rows the same keys, in the schemas of tools too.
    """

    def __init__(self, file: Path) -> None:
        """Read the file, unless it was read before and did not change since.

        Raises:
            InvalidInputError: there is no such file, it has no lines, or a line is not an example.
        """
        if not file.is_file():
            raise InvalidInputError(f"the examples {file} cannot be read: there is no such file")
        self._file = file
        self._lines = _read_lines(file, file.stat().st_mtime_ns)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> _Example:
        number, line = self._lines[index]
        return _parse(line, f"{self._file}, line {number}")


@functools.lru_cache(maxsize=_NUM_FILES)
def _read_lines(file: Path, _changed_ns: int) -> tuple[tuple[int, str], ...]:
    """The lines that are not empty, each with its number; all are checked."""
    try:
        lines = read_text(file, max_bytes=MAX_ROWS_BYTES).split("\n")
    except (OSError, InvalidInputError) as error:
        raise InvalidInputError(f"the examples {file} must be a text file: {error}") from None
    found = tuple((number, line) for number, line in enumerate(lines, 1) if line.strip())
    if not found:
        raise InvalidInputError(f"the examples {file} must have at least one line, got none")
    for number, line in found:
        _parse(line, f"{file}, line {number}")
    return found


def _parse(line: str, place: str) -> _Example:
    try:
        row = read_json(line, max_bytes=MAX_ROWS_BYTES)
    except InvalidInputError as error:
        raise InvalidInputError(f"{place}: {error}") from None
    params = row.get(_PARAMS) if isinstance(row, dict) else None
    if not isinstance(params, dict) or not params.get("input"):
        raise InvalidInputError(
            f"{place} must have {_PARAMS}.input, the first messages, got {line[:200]!r}: where a template has the "
            "prompts, let NeMo Gym prepare the examples first"
        )
    return _Example(row=row, place=place)


_CLOSE_TIMEOUT_S = 5.0


class _ResourcesSession:
    """One session with a server, over HTTP. The server is asked one thing after the other, in the order of the calls.

    POST /seed_session   the example                            a cookie, which names the session
    POST /TOOL           the arguments of a call                the answer, as it is
    POST /verify         the example, with the response         {"reward": 1.0, ...}
    POST /close_session  {}, for servers that hold something until then
    """

    def __init__(self, url: str, *, timeout_s: float, verify_timeout_s: float) -> None:
        """Prepare the session; `timeout_s` is for each answer but that of the verifier."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InvalidInputError(f"url must begin with http:// or https:// and a host, got {url!r}")
        self._url = url.rstrip("/")
        self._is_local = parts.hostname in ("127.0.0.1", "localhost", "::1")
        self._timeout_s = timeout_s
        self._verify_timeout_s = verify_timeout_s
        self._turn = asyncio.Lock()
        self._http: Any = None

    async def seed(self, row: Mapping[str, Any]) -> None:
        """Begin the session with an example."""
        self._http = self._connect()
        self._check(*await self._post("/seed_session", row, self._timeout_s), "/seed_session")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[int, str]:
        """Call a tool; returns the status of the answer and its text."""
        return await self._post(f"/{quote(name)}", arguments, self._timeout_s)

    async def verify(self, row: Mapping[str, Any], response: Mapping[str, Any]) -> float:
        """The reward of a response.

        Raises:
            EnvServerError: the server has none, or says that it does not count (`mask_sample`).
        """
        status, text = await self._post("/verify", {**row, "response": response}, self._verify_timeout_s)
        self._check(status, text, "/verify")
        try:
            result = read_json(text, max_bytes=MAX_ANSWER_BYTES)
            reward = to_finite_float32(result["reward"], name="reward", error=RewardError)
        except (InvalidInputError, RewardError, TypeError, KeyError) as error:
            raise EnvServerError(
                f"the NeMo Gym server {self._url} must answer /verify with a reward, got {text[:500]}: "
                f"{format_error(error)}"
            ) from None
        if result.get("mask_sample"):
            reason = result.get("failure_reason") or result.get("failure_kind") or "it does not say why"
            raise EnvServerError(f"the NeMo Gym server {self._url} could not verify the rollout: {reason}")
        return reward

    async def close(self) -> None:
        """End the session. Servers that hold nothing for one refuse that, which is no error."""
        if self._http is None:
            return
        try:
            if self._http.cookies:  # the session was begun
                status, text = await self._post("/close_session", {}, _CLOSE_TIMEOUT_S)
                if status >= 500:
                    self._check(status, text, "/close_session")
        finally:
            http, self._http = self._http, None
            await http.aclose()

    def _connect(self) -> Any:
        try:
            import httpx
        except ImportError as error:
            raise missing_extra(error, "url needs the package httpx", "nemo-gym") from error
        # Without TLS no certificates are read, which takes longer than all requests of a short rollout.
        return httpx.AsyncClient(
            timeout=None, trust_env=not self._is_local, verify=urlsplit(self._url).scheme == "https"
        )

    async def _post(self, path: str, body: Mapping[str, Any], timeout_s: float) -> tuple[int, str]:
        """The status of the answer and its text."""
        import httpx

        assert self._http is not None, "the session has begun"
        try:
            async with (
                self._turn,
                asyncio.timeout(timeout_s),
                self._http.stream("POST", f"{self._url}{path}", json=dict(body)) as response,
            ):
                data = bytearray()
                async for piece in response.aiter_bytes():
                    data += piece
                    if len(data) > MAX_ANSWER_BYTES:
                        raise EnvServerError(
                            f"the NeMo Gym server {self._url} must answer {path} with at most {MAX_ANSWER_BYTES} bytes"
                        )
                return response.status_code, data.decode("utf-8", "replace")
        except TimeoutError:
            raise EnvServerError(
                f"the NeMo Gym server {self._url} did not answer {path} within {timeout_s:g} s"
            ) from None
        except (httpx.HTTPError, OSError) as error:
            raise EnvServerError(
                f"the NeMo Gym server {self._url} cannot be reached for {path}: {format_error(error)}"
            ) from error

    def _check(self, status: int, text: str, path: str) -> None:
        if status >= 400:
            raise EnvServerError(f"the NeMo Gym server {self._url} answered {path} with {status}: {text[:500]}")


_Item = dict[str, Any]
"""An item of OpenAI's Responses: the form in which NeMo Gym keeps examples and verifies replies.

{"role": "developer", "content": [{"type": "input_text", "text": "Add."}]}  ->  {"role": "system", "content": "Add."}

assistant: reasoning, content, calls  ->  reasoning, message, function_call, ...
tool                                  ->  function_call_output
"""
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def _read_messages(params: Mapping[str, Any], place: str) -> list[Message]:
    """The first messages of an example: its instructions and its input.

    Developer messages become system messages, and system messages at the beginning become one, as most templates write
    neither developer messages nor a second system message.

    Raises:
        InvalidInputError: an item or a part is of a type that a conversation here does not have.
    """
    given = params["input"]
    if not isinstance(given, (str, list)):
        raise InvalidInputError(f"{place}, input must be a text or a list, got {_quote(given)}")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
    if params.get("instructions"):
        items.insert(0, {"role": "system", "content": params["instructions"]})
    messages: list[Message] = []
    for k, item in enumerate(items):
        _add_item(messages, item, f"{place}, input[{k}]")
    return messages


def _read_tools(params: Mapping[str, Any], place: str) -> list[ToolSchema]:
    """The functions that the model may call; raises `InvalidInputError` for a tool that is not a function."""
    given = params.get("tools") or []
    if not isinstance(given, list):
        raise InvalidInputError(f"{place}, tools must be a list, got {_quote(given)}")
    tools: list[ToolSchema] = []
    for k, tool in enumerate(given):
        if not isinstance(tool, Mapping) or tool.get("type") != "function" or not tool.get("name"):
            raise InvalidInputError(f"{place}, tools[{k}] must be a function with a name, got {_quote(tool)}")
        parameters = tool.get("parameters") or {}
        if not isinstance(parameters, Mapping):
            raise InvalidInputError(f"{place}, tools[{k}].parameters must be an object, got {_quote(parameters)}")
        schema = {"type": "object", "properties": {}, **parameters}
        function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": schema}
        tools.append(cast(ToolSchema, {"type": "function", "function": function}))
    return tools


def _make_response(params: Mapping[str, Any], messages: Sequence[Message], *, is_cut: bool) -> dict[str, Any]:
    """The response object of Responses for all messages after the first ones; `is_cut` if the last turn was cut."""
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": params.get("model") or "unbroken",
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": [item for message in messages for item in _write_items(message)],
        "parallel_tool_calls": params.get("parallel_tool_calls", True),
        "tool_choice": params.get("tool_choice") or "auto",
        "tools": params.get("tools") or [],
    }


def _add_item(messages: list[Message], item: Any, place: str) -> None:
    kind = item.get("type") or "message" if isinstance(item, Mapping) else None
    if kind == "function_call_output":
        content = _read_content(item.get("output"), f"{place}.output")
        messages.append(cast(Message, {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}))
    elif kind == "message" and item.get("role") in ("system", "developer"):
        text = get_text(cast(Any, _read_content(item.get("content"), f"{place}.content")))
        if [message["role"] for message in messages] == ["system"]:
            text = f"{messages.pop()['content']}\n\n{text}"
        messages.append({"role": "system", "content": text})
    elif kind == "message" and item.get("role") == "user":
        messages.append(cast(Message, {"role": "user", "content": _read_content(item.get("content"), place)}))
    elif kind in ("function_call", "reasoning") or (kind == "message" and item.get("role") == "assistant"):
        _add_to_reply(messages, item, kind, place)
    else:
        raise InvalidInputError(
            f"{place} must be a message, a function_call, its function_call_output or reasoning, got {_quote(item)}"
        )


def _add_to_reply(messages: list[Message], item: Mapping[str, Any], kind: str, place: str) -> None:
    """Add an item of the assistant; those that follow one another are one message."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    reply = messages[-1]
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        reply.setdefault("tool_calls", []).append(cast(Any, call))
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        reply["reasoning_content"] = get_text(cast(Any, _read_content(parts, place)))
    else:
        reply["content"] = get_text(reply["content"]) + get_text(cast(Any, _read_content(item.get("content"), place)))


def _read_content(content: Any, place: str) -> str | list[ContentPart]:
    """A text, or parts: texts and images. Parts that are all text are one text."""
    if isinstance(content, str):
        return content
    given = content if isinstance(content, list) else [content]
    parts = [_read_part(part, f"{place}[{k}]") for k, part in enumerate(given)]
    return get_text(parts) if all(part["type"] == "text" for part in parts) else parts


def _read_part(part: Any, place: str) -> ContentPart:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _TEXTS and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "input_image" and part.get("image_url"):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    raise InvalidInputError(f"{place} must be a text or an image with a URL, got {_quote(part)}")


def _write_items(message: Message) -> Iterator[_Item]:
    if message["role"] == "tool":
        output = get_text(message["content"])
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": output}
        return
    text, reasoning, calls = get_text(message["content"]), get_reasoning(message), message.get("tool_calls") or []
    if message["role"] != "assistant":
        yield {"type": "message", "role": message["role"], "content": text}
        return
    if reasoning:
        yield {"type": "reasoning", "id": _make_id("rs"), "summary": [{"type": "summary_text", "text": reasoning}]}
    if text or not (reasoning or calls):
        part = {"type": "output_text", "text": text, "annotations": []}
        yield {"type": "message", "id": _make_id("msg"), "role": "assistant", "status": "completed", "content": [part]}
    for call in calls:
        arguments = call["function"]["arguments"]
        yield {
            "type": "function_call",
            "id": _make_id("fc"),
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
            "status": "completed",
        }


def _make_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _quote(value: Any) -> str:
    return shorten(repr(value), 200)
