"""Every error a caller can cause, and what each one means.

    UnbrokenError
    ├── InvalidInputError        a value from outside breaks a stated rule (also a ValueError)
    │   ├── MessagesError        messages that cannot be rendered as they are
    │   ├── ToolDefinitionError  a function that cannot be described as a tool
    │   ├── SamplingError        sampling parameters or a request an engine cannot honour
    │   │   └── ContextOverflowError   the prompt leaves no room in the context
    │   ├── ImageError           an image that is broken, beyond a limit, or does not fit its prompt
    │   │   └── UnknownImageError      a reference to an image that was not sent
    │   └── RewardError          a reward that is not one finite number per trajectory
    ├── TemplateError            the chat template is missing, does not compile, or refuses the messages
    ├── InvariantError           ids, masks, logprobs or versions contradict each other (I1 to I7)
    │   └── EchoError            an engine reports another prompt than it was sent (I3)
    ├── EngineError              the engine stopped or cannot serve the call
    │   └── ServerError          a server failed on a request
    │       ├── ServerBusyError         it is full: ask again later
    │       ├── ServerUnreachableError  no connection to it
    │       └── ServerBehindError       it samples with older weights than it was given
    ├── WeightsError             weights that cannot be written or sent, or did not come as they were
    ├── CheckpointError          a checkpoint that cannot be written, or is not what was written
    ├── MetricsError             metrics that cannot be written
    ├── RolloutError             every rollout of a step failed
    ├── OutageError              engines stayed away for longer than a run waits for them
    └── TrainingError            an update that is not finite; it was not made

A message says what was expected, what came (with values) and what to do about it.
"""

from __future__ import annotations

import re


class UnbrokenError(Exception):
    """Base class of all errors raised on purpose by this package."""


class InvalidInputError(UnbrokenError, ValueError):
    """A value from outside breaks a rule; the message names the field, the rule and the value."""


class MessagesError(InvalidInputError):
    """A message list that is empty, malformed, or in an order no template can render."""


class ToolDefinitionError(InvalidInputError):
    """A Python function whose signature or docstring cannot be turned into a tool schema."""


class SamplingError(InvalidInputError):
    """Sampling parameters out of range, or a request the engine cannot honour."""


class ContextOverflowError(SamplingError):
    """The prompt is as long as the context or longer: nothing can be sampled."""

    def __init__(self, *, num_prompt_tokens: int, context_length: int) -> None:
        super().__init__(
            f"This model's maximum context length is {context_length} tokens, but your request has "
            f"{num_prompt_tokens} input tokens: at least one token must be left to sample. Shorten the prompt."
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.context_length = context_length

    @classmethod
    def from_message(cls, message: str) -> ContextOverflowError:
        """The error that a server tells in these words."""
        numbers = [int(number) for number in re.findall(r"(\d+) (?:input )?tokens", message)]
        context_length, num_prompt_tokens = numbers[:2] if len(numbers) >= 2 else (0, 0)
        error = cls(num_prompt_tokens=num_prompt_tokens, context_length=context_length)
        error.args = (message,)
        return error


class ImageError(InvalidInputError):
    """An image that cannot be used: broken, beyond a limit, or without its place in the prompt."""


class UnknownImageError(ImageError):
    """A reference to an image that is not here, or not any more: it must be sent again."""

    def __init__(self, sha256: str, *, name: str = "image") -> None:
        super().__init__(
            f"{name} must be an image that was sent before, got sha256:{sha256[:80]}: send the image itself"
        )
        self.sha256 = sha256


class RewardError(InvalidInputError):
    """A reward that is NaN, infinite, of the wrong type or of the wrong shape."""


class TemplateError(UnbrokenError):
    """The tokenizer has no chat template, it does not compile, or it refuses these messages."""


class InvariantError(UnbrokenError):
    """Token ids, masks, logprobs or policy versions contradict each other.

    Raised where data enters, before anything is trained on it. Nothing is padded, cut or filled in to make it fit.
    """


class EchoError(InvariantError):
    """The engine reports a prompt that differs from the one it was sent (I3)."""


class EngineError(UnbrokenError):
    """The engine is closed, stopped with an error of its own, or does not support the call."""


class ServerError(EngineError):
    """A server answered that it failed, or with something that is no answer."""


class ServerBusyError(ServerError):
    """A server's queue is full, and stayed so over all tries."""


class ServerUnreachableError(ServerError):
    """There is no connection to a server, and there was none over all tries."""


class ServerBehindError(ServerError):
    """A server answered with older weights than those published to it: it was started again."""


class WeightsError(UnbrokenError):
    """Weights that cannot be written or sent, or did not come as they were: the engines keep the version they have."""


class CheckpointError(UnbrokenError):
    """A checkpoint that cannot be written, is incomplete or changed, or belongs to another trainer."""


class MetricsError(UnbrokenError):
    """Metrics that cannot be written, because of a full disk, say."""


class RolloutError(UnbrokenError):
    """Every rollout of a step failed: something is wrong with all of them, and more steps would not mend it."""


class OutageError(UnbrokenError):
    """Engines stayed away, or behind, for longer than the run waits for them; the message says how to go on."""


class TrainingError(UnbrokenError):
    """Loss or gradients of an update are NaN or infinite; the update was not made."""
