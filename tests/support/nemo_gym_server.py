"""A resources server that speaks NeMo Gym's protocol: a counter for each session, as that of its example
`example_session_state_mgmt`. The session is a cookie; /verify takes the response in the form of OpenAI's Responses.
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from openai.types.responses import Response as OpenAIResponse
from pydantic import BaseModel

COOKIE = "CounterServer___counter"
TOOLS = [
    {
        "type": "function",
        "name": "increment_counter",
        "description": "Add to the counter.",
        "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]},
        "strict": True,
    },
    {
        "type": "function",
        "name": "get_counter_value",
        "description": "",
        "parameters": {"type": "object", "properties": {}, "required": []},
        "strict": True,
    },
]


class Increment(BaseModel):
    count: int


@dataclass(slots=True, kw_only=True)
class CounterServer:
    """What the server knows, for tests to look at."""

    counters: dict[str, int] = field(default_factory=dict)
    closed: list[str] = field(default_factory=list)
    verified: list[dict[str, Any]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    verdict: dict[str, Any] | bytes | None = None
    """What /verify answers instead of its own reward."""

    def make_app(self) -> FastAPI:
        app = FastAPI()

        @app.middleware("http")
        async def add_cookie(request: Request, call_next: Any) -> Response:
            session = request.cookies.get(COOKIE) or uuid.uuid4().hex
            request.state.session = session
            response: Response = await call_next(request)
            response.set_cookie(COOKIE, session, httponly=True)
            return response

        app.post("/seed_session")(self.seed)
        app.post("/increment_counter")(self.increment)
        app.post("/get_counter_value")(self.read)
        app.post("/verify")(self.verify)
        app.post("/close_session")(self.close)
        return app

    async def seed(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        if "initial_count" not in body:
            raise HTTPException(422, "initial_count is missing")
        self.counters[request.state.session] = body["initial_count"]
        return {}

    async def increment(self, request: Request, body: Increment) -> dict[str, bool]:
        await asyncio.sleep(0.05)  # so that a call which does not wait for this one is answered first
        self.calls.append(f"increment {body.count}")
        self.counters[request.state.session] += body.count
        return {"success": True}

    async def read(self, request: Request) -> dict[str, int]:
        self.calls.append("read")
        return {"count": self.counters[request.state.session]}

    async def verify(self, request: Request, body: dict[str, Any]) -> Any:
        items = [item for item in body["response"]["output"] if item["type"] != "function_call_output"]
        own = [item for item in items if item["type"] != "message" or item["role"] == "assistant"]
        OpenAIResponse.model_validate({**body["response"], "output": own})
        self.verified.append(body)
        if isinstance(self.verdict, bytes):
            return Response(self.verdict, media_type="application/json")
        if self.verdict is not None:
            return self.verdict
        return {**body, "reward": float(self.counters[request.state.session] == body["expected_count"])}

    async def close(self, request: Request) -> dict[str, bool]:
        self.closed.append(request.state.session)
        return {"closed": True}


def make_example(
    text: str = "Add 4, then read.", *, start: int = 3, expected: int = 7, **params: Any
) -> dict[str, Any]:
    """An example of the counter."""
    given = {"input": [{"role": "user", "content": text}], "tools": TOOLS, **params}
    return {"responses_create_params": given, "initial_count": start, "expected_count": expected}


def save_examples(folder: Path, *examples: dict[str, Any]) -> Path:
    """A file of these examples."""
    file = folder / "examples.jsonl"
    file.write_text("".join(json.dumps(example) + "\n" for example in examples or (make_example(),)), "utf-8")
    return file


if __name__ == "__main__":
    uvicorn.run(CounterServer().make_app(), port=int(sys.argv[1]), log_level="error")
