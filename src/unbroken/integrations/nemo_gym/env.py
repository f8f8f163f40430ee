"""Environments that resources servers of NeMo Gym serve; needs the extra `nemo-gym`.

    environment = "unbroken.integrations.nemo_gym:NeMoGymEnv"
    environment_arguments = { url = "http://127.0.0.1:8000", file = "example.jsonl" }

The protocol is that of a resources server of nemo-gym 0.4 to 0.7, as its `simple_agent` uses it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unbroken.integrations.nemo_gym.client import ResourcesSession
from unbroken.integrations.nemo_gym.examples import Examples
from unbroken.integrations.nemo_gym.items import make_response, read_messages, read_tools
from unbroken.messages import Message, ToolSchema
from unbroken.rollout.env import EnvStart, Outcome, Reply
from unbroken.rollout.seeds import EpochOrder
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.tools import Tool, ToolOutcome, ToolStatus
from unbroken.types import FinishReason

_STATUSES = {404: ToolStatus.UNKNOWN_TOOL, 422: ToolStatus.INVALID_ARGUMENTS}


class NeMoGymEnv(ToolEnv):
    """An example with its tools, which the server runs, until a reply has no calls. Its verifier gives the reward.

    Each rollout has a session of its own. The calls of a turn are made one after the other, in order, and their answers
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
        self._session = ResourcesSession(url, timeout_s=timeout_s, verify_timeout_s=verify_timeout_s)
        self._timeout_s = timeout_s
        self._first = read_messages(self._example.params, self._example.place)
        self._is_cut = False
        self.add_tools([self._make_tool(schema) for schema in read_tools(self._example.params, self._example.place)])

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
        response = make_response(self._example.params, new, is_cut=self._is_cut)
        return await self._session.verify(self._example.row, response)

    def _make_tool(self, schema: ToolSchema) -> Tool:
        function = functools.partial(self._call_tool, schema["function"]["name"])
        return Tool(function=function, schema=schema, timeout_s=self._timeout_s, checks_arguments=False)

    async def _call_tool(self, name: str, /, **arguments: Any) -> ToolOutcome:
        status, text = await self._session.call(name, arguments)
        failed = _STATUSES.get(status, ToolStatus.ERROR)
        return ToolOutcome(status=ToolStatus.OK if status < 400 else failed, content=text)
