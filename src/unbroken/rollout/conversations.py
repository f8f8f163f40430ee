r"""Rows of conversations that somebody else had: each assistant turn is trained as if the model had sampled it.

    user       2 + 2?      <|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n    the prompt
    assistant  4           4<|im_end|>                                                    trained
    user       + 1?        \n<|im_start|>user\n+ 1?<|im_end|>\n<|im_start|>assistant\n    the bridge
    assistant  5           5<|im_end|>                                                    trained

The ids of a turn are what the template writes for it as the last message, after the prompt that it would have been
sampled from, up to the id that sampling stops at. Prompts are built as in a rollout (`PromptBuilder`): so each trained
id has the context that it would have had, and where a rollout forks, a conversation has several rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unbroken.errors import MessagesError
from unbroken.ledger.tree import TokenTree, export_samples
from unbroken.messages import (
    FunctionCall,
    Message,
    ToolSchema,
    check_conversation,
    check_tools,
    get_reasoning,
    get_text,
)
from unbroken.rendering.base import ParsedResponse, Renderer, ToolCallStatus
from unbroken.rollout.prompts import Prompt, PromptBuilder, attach_given
from unbroken.rollout.trajectory import Turn
from unbroken.types import FinishReason, SampledSequence, TokenIds, TrainingSample, VersionSpan

_NEVER_TRAINED = ("weight", "train", "loss")
"""Keys by which others leave turns out of the loss. Reading them is not built, and ignoring them would train these."""


def make_conversation_rows(
    messages: Sequence[Message], *, tools: Sequence[ToolSchema] = (), renderer: Renderer
) -> list[TrainingSample]:
    """The rows of a conversation, which train all of its assistant turns once. What comes after the last one is left
    out. Logprobs and versions are stand-ins (0), because nothing was sampled.

    Raises:
        MessagesError: there is no assistant turn; or of one it cannot be shown which ids the model would have written.
        ToolDefinitionError, TemplateError: as `Renderer.render`.
    """
    check_conversation(messages)
    check_tools(tools)
    places = _find_turns(messages)
    messages = [_decode_arguments(each) if each["role"] == "assistant" else each for each in messages]
    tree = TokenTree()
    prompts = PromptBuilder(renderer, tree)
    last: Turn | None = None
    for place in places:
        earlier, message = messages[:place], messages[place]
        completion_ids, parsed = _find_completion(messages, place, tools=tools, renderer=renderer)
        prompt = _build_prompt(prompts, last, earlier, tools)
        last = _add_turn(tree, prompt, completion_ids, message, parsed)
    return export_samples(tree, 0.0)


def _find_turns(messages: Sequence[Message]) -> list[int]:
    """The places of the assistant turns, each of which is one that a model could have sampled."""
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not places:
        raise MessagesError("messages must have an assistant turn, got none: there would be nothing to train")
    for place in places:
        if place == 0 or place - 1 in places:
            before = "follows another assistant turn" if place else "is the first message"
            raise MessagesError(
                f"messages[{place}] must answer another message, and it {before}: what the model says at once is one "
                "turn"
            )
        _check_turn(messages[place], f"messages[{place}]")
    return places


def _check_turn(message: Mapping[str, Any], place: str) -> None:
    """Raise `MessagesError` for a turn without anything, or one that was marked as not to be trained."""
    if not (get_text(message.get("content")).strip() or message.get("tool_calls") or get_reasoning(message)):
        raise MessagesError(f"{place} is an assistant turn without content, reasoning and tool calls")
    if found := [key for key in _NEVER_TRAINED if message.get(key) is not None]:
        raise MessagesError(f"{place} must be without {found[0]!r}: every assistant turn is trained")


def _decode_arguments(message: Message) -> Message:
    """The turn with the arguments of its calls as objects, as a sampled one has them."""
    found: Any = {**message, "content": message.get("content") or ""}
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [{**call, "function": _decode_function(call["function"])} for call in calls]
    decoded: Message = found
    return decoded


def _decode_function(function: FunctionCall) -> Mapping[str, Any]:
    arguments = function.get("arguments", {})
    return {**function, "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}


def _find_completion(
    messages: Sequence[Message], place: int, *, tools: Sequence[ToolSchema], renderer: Renderer
) -> tuple[TokenIds, ParsedResponse]:
    """What the model would have written as this message after those before it, and how it is read."""
    earlier, message = list(messages[:place]), messages[place]
    prompt = renderer.render(earlier, tools=tools)
    if prompt.images:
        raise MessagesError("messages must be without images, which supervised rows do not have")
    prompt_ids, whole = prompt.token_ids, renderer.render_ids([*earlier, message], tools=tools)
    if not np.array_equal(whole[: len(prompt_ids)], prompt_ids):
        raise MessagesError(
            f"messages[{place}] as the chat template writes it does not begin with the ids that the model would have "
            "been given: the template opens the turn in another way, such as with reasoning that the message does not "
            "have, or its first characters and those before it are one id"
        )
    stops = renderer.get_stop_token_ids()
    if not np.isin(whole[len(prompt_ids) :], stops).any():
        # GLM's template writes no end: a turn ends with the header of what follows, which is sampled.
        follower: Message = messages[place + 1] if place + 1 < len(messages) else {"role": "user", "content": "Go on."}
        followed = renderer.render_ids([*earlier, message, follower], tools=tools)
        if np.array_equal(followed[: len(whole)], whole):
            whole = followed[: len(whole) + 1]
    written = whole[len(prompt_ids) :]
    if len(ends := np.flatnonzero(np.isin(written, stops))) == 0:
        raise MessagesError(f"messages[{place}] as the chat template writes it has no id that sampling would stop at")
    completion_ids = written[: ends[0] + 1]
    parsed = renderer.parse_response(completion_ids, prompt_ids=prompt_ids, tools=tools)
    if (problem := _find_difference(message, parsed)) is not None:
        raise MessagesError(
            f"messages[{place}] must be what is read back from the ids that the chat template writes for it, and its "
            f"{problem}"
        )
    return completion_ids, parsed


def _find_difference(message: Message, parsed: ParsedResponse) -> str | None:
    """What of a message is not read back from its ids, but for white space around texts, which templates trim."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    read = [(call.name, call.arguments) for call in parsed.tool_calls if call.status is ToolCallStatus.OK]
    if read != calls or parsed.failures:
        return (
            f"tool calls are {calls!r:.200}, and read back {read!r:.200}: the template writes no calls that can be read"
        )
    texts = {
        "content": (get_text(message["content"]), parsed.content),
        "reasoning": (get_reasoning(message) or "", parsed.reasoning),
    }
    for name, (own, other) in texts.items():
        if own.strip() != other.strip():
            return f"{name} is {own[:80]!r}, and read back {other[:80]!r}"
    return None


def _build_prompt(
    prompts: PromptBuilder, last: Turn | None, earlier: Sequence[Message], tools: Sequence[ToolSchema]
) -> Prompt:
    """The prompt of the next turn: the first one, a bridge, or a fork."""
    if last is None:
        return prompts.render(earlier, tools=tools, last=None, reason=None)
    place = max(k for k, message in enumerate(earlier) if message["role"] == "assistant")
    return prompts.extend(last, earlier[place + 1 :], earlier=earlier[:place], tools=tools)


def _add_turn(
    tree: TokenTree, prompt: Prompt, completion_ids: TokenIds, message: Message, parsed: ParsedResponse
) -> Turn:
    """Record a turn as a rollout does."""
    num_ids = len(completion_ids)
    sequence = SampledSequence(
        completion_ids=completion_ids,
        rollout_logprobs=np.zeros(num_ids, dtype=np.float32),
        finish_reason=FinishReason.STOP,
        version_spans=(VersionSpan(start=0, stop=num_ids, policy_version=0),),
    )
    prompt_end = attach_given(tree, prompt.parent, prompt.given)
    end = tree.add_sampled(sequence, parent=prompt_end)
    return Turn(
        prompt_end=prompt_end,
        end=end,
        sequence=sequence,
        message=message,
        parsed=parsed,
        bridge=prompt.bridge,
        fork=prompt.fork,
        cut_by=None,
    )
