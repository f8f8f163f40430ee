"""Clients of the stand-in."""

from __future__ import annotations

from typing import Any


class OpenAIChatCompletionsClient:
    """Asks through an `AsyncOpenAI`."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def get_response(self, messages: list[Any], model: str, sampling_args: Any) -> dict[str, Any]:
        tool = {"name": "look", "parameters": {"type": "object", "properties": {"cell": {"type": "integer"}}}}
        answer = await self._client.chat.completions.create(
            model=model, messages=messages, tools=[{"type": "function", "function": tool}], **sampling_args
        )
        message = answer.choices[0].message
        calls = [call.model_dump() for call in message.tool_calls or ()]
        return {"role": "assistant", "content": message.content, **({"tool_calls": calls} if calls else {})}
