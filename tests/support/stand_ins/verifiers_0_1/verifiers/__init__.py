"""Stands in for verifiers 0.1: the part of its interface that we use, with an environment that looks into cells.

As in the package, making an environment takes over SIGTERM, errors of a rollout are in its state, and a rubric with
group rewards scores states together.
"""

from __future__ import annotations

import copy
import signal
from typing import Any

__version__ = "0.1.14"


class Error(Exception): ...


class EmptyModelResponseError(Error): ...


class SandboxError(Error): ...


class Rubric:
    def __init__(self, *, compares: bool) -> None:
        self.has_group_rewards = compares
        self.cleaned: list[Any] = []

    async def score_rollout(self, state: dict[str, Any]) -> None:
        assert not self.has_group_rewards
        state["reward"] = state["completion"][-1]["content"] == state["answer"] if state["completion"] else 0.0
        state["metrics"] = {"num_turns": len(state["trajectory"]), "unknown": None}

    async def score_group(self, states: list[dict[str, Any]]) -> None:
        for state in states:
            state["reward"] = len(states)
            state["metrics"] = {"rank": states.index(state)}

    async def cleanup(self, state: dict[str, Any]) -> None:
        self.cleaned.append(state)


class Environment:
    """What all environments are."""


class LookEnv(Environment):
    """Asks, looks into the cell that the model calls for, and asks again."""

    def __init__(self, *, cells: int = 2, compares: bool = False, error: Error | None = None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.rubric = Rubric(compares=compares)
        self.sampling_args = {"n": 1, "extra_body": {}, "top_p": 0.5}
        self.error = error
        self.cells = cells

    @property
    def requires_group_rollouts(self) -> bool:
        return self.rubric.has_group_rewards

    def get_dataset(self) -> Any:
        if self.cells < 0:
            raise ValueError("dataset is not set")
        return [
            {
                "example_id": cell,
                "prompt": [{"role": "user", "content": f"What is in cell {cell}?"}],
                "answer": "It is 17.",
            }
            for cell in range(self.cells)
        ]

    def get_eval_dataset(self) -> Any:
        return self.get_dataset()[:1]

    async def rollout(self, row: Any, client: Any, model: str, sampling_args: Any) -> dict[str, Any]:
        state = {**row, "completion": [], "trajectory": [], "reward": None, "metrics": None, "error": None}
        messages = state["prompt"]
        messages.append({"role": "user", "content": "Look first."})  # rows must be ours to change
        while True:
            reply = await client.get_response(messages, model, sampling_args)
            state["trajectory"].append(reply)
            messages.append(reply)
            state["completion"].append(reply)
            if self.error is not None:
                state["error"] = self.error
            if not reply.get("tool_calls") or self.error is not None:
                return state
            messages.append({"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "17"})

    async def run_rollout(self, row: Any, client: Any, model: str, sampling_args: Any) -> dict[str, Any]:
        state = await self.rollout(row, client, model, sampling_args)
        await self.rubric.score_rollout(state)
        error = state["error"]
        if error is not None:
            words = repr(error)
            state["error"] = {"error": type(error).__name__, "error_chain_repr": words, "error_chain_str": words}
        return copy.deepcopy(state)


class HarnessEnv(LookEnv):
    """As those of `verifiers.v1` in 0.1, whose harness runs whole groups."""

    harness = object()


def load_environment(name: str, **arguments: Any) -> LookEnv:
    """Know `look` and `harness`."""
    errors = {"empty": EmptyModelResponseError("said nothing"), "sandbox": SandboxError("no sandbox")}
    if "error" in arguments:
        arguments["error"] = errors[arguments["error"]]
    try:
        return {"look": LookEnv, "harness": HarnessEnv}[name](**arguments)
    except KeyError:
        raise ValueError(f"Could not import '{name}' environment.") from None
