"""All errors that a caller can cause.

    UnbrokenError
    ├── InvalidInputError        a value from outside breaks a stated rule (also a ValueError)
    │   ├── MessagesError        messages that cannot be rendered as they are
    │   ├── ToolDefinitionError  a function that cannot be described as a tool
    │   ├── ToolsNotShownError   tools that the chat template does not show to the model
    │   ├── SamplingError        sampling parameters or a request that the engine does not support
    │   │   ├── ContextOverflowError   the prompt leaves no room in the context
    │   │   └── UnknownPolicyError     no weights of this name, or not of this version
    │   ├── ImageError           an image that is broken, exceeds a limit or does not match its prompt
    │   │   └── UnknownImageError      a reference to an image that is not stored
    │   └── RewardError          a reward that is not one finite number per trajectory
    ├── TemplateError            the chat template is missing, does not compile, or refuses the messages
    │   └── StopTokenError       no id ends a turn of this template
    ├── InvariantError           ids, masks, logprobs or versions that contradict each other (I1 to I7)
    │   ├── EchoError            an engine reports another prompt than it was sent (I3)
    │   └── PolicyMismatchError  the sampler's policy is not the trainer's (I9)
    ├── EngineError              the engine stopped or does not support the call
    │   ├── IncompleteWeightsError  an update ended half-way: a whole version must come
    │   └── ServerError          a server failed on a request
    │       ├── ServerBusyError         its queue is full
    │       ├── ServerUnreachableError  it cannot be connected to
    │       └── ServerBehindError       it samples with older weights than it was given
    ├── EnvServerError           a server of an environment or of its tools failed
    ├── TaskError                the environment or the verifier of a terminal task failed
    ├── StoreError               sessions that cannot be stored or read
    │   ├── UnknownSessionError      there is no such session
    │   ├── SessionEndedError        a finished or expired session takes no turns
    │   └── NotOwnerError            another gateway owns the session
    ├── WeightsError             weights that cannot be written or sent, or that changed on the way
    ├── CheckpointError          a checkpoint that cannot be written, or that changed since it was written
    ├── ExportError              a model folder that cannot be written, or sent to the hub
    ├── MetricsError             metrics that cannot be written
    ├── RolloutError             every rollout of a step failed, or several steps in a row taught nothing
    ├── OutageError              engines were unavailable for longer than a run waits
    └── TrainingError            an update that is not finite and was not applied, or another process that failed

A message says what was expected, what came (with values) and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


class UnbrokenError(Exception):
    """Base class of all errors that this package raises on purpose."""


class InvalidInputError(UnbrokenError, ValueError):
    """A value from outside breaks a rule."""


def install_command(extra: str) -> str:
    """How the packages of an extra are added: pip takes them from the unbroken that is installed, a clone too."""
    return f"pip install 'unbroken[{extra}]'"


def missing_extra(error: ImportError, need: str, extra: str) -> InvalidInputError:
    """Make the error of what needs an extra; an import error of our own modules is raised as it is."""
    if (error.name or "").startswith("unbroken"):
        raise error
    return InvalidInputError(f"{need}: {install_command(extra)} ({error})")


class MessagesError(InvalidInputError):
    """A message list that is empty, malformed, or in an order no template can render."""


class ToolDefinitionError(InvalidInputError):
    """A Python function whose signature or docstring cannot be turned into a tool schema."""


class SamplingError(InvalidInputError):
    """Sampling parameters out of range, or a request that the engine does not support."""


class ContextOverflowError(SamplingError):
    """The prompt fills the context: nothing can be sampled."""

    def __init__(self, *, num_prompt_tokens: int, context_length: int) -> None:
        super().__init__(
            f"This model's maximum context length is {context_length} tokens, but your request has "
            f"{num_prompt_tokens} input tokens: at least one token must be left to sample. Shorten the prompt."
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.context_length = context_length

    @classmethod
    def from_message(cls, message: str) -> ContextOverflowError:
        """Rebuild the error from a server's message."""
        numbers = [int(number) for number in re.findall(r"(\d+) (?:input )?tokens", message)]
        context_length, num_prompt_tokens = numbers[:2] if len(numbers) >= 2 else (0, 0)
        error = cls(num_prompt_tokens=num_prompt_tokens, context_length=context_length)
        error.args = (message,)
        return error


class UnknownPolicyError(SamplingError):
    """A name that claims to be a policy, and there are no such weights, or their version is another one."""

    @classmethod
    def of(cls, name: str, known: Sequence[str]) -> UnknownPolicyError:
        """The error for a name, with those that there are."""
        return cls(f"the model {name} does not exist: this server has {list(known)}")


class ImageError(InvalidInputError):
    """An image that is broken, exceeds a limit or does not match the placeholders of its prompt."""


class UnknownImageError(ImageError):
    """A reference to an image that is not stored, or no longer: the image must be sent again."""

    def __init__(self, sha256: str, *, name: str = "image") -> None:
        super().__init__(
            f"{name} must refer to an image that was sent before, got sha256:{sha256[:80]}: send the image itself"
        )
        self.sha256 = sha256


class RewardError(InvalidInputError):
    """A reward that is NaN, infinite, or of the wrong type or shape."""


class TemplateError(UnbrokenError):
    """The tokenizer has no chat template, it does not compile, or it refuses these messages."""


class ToolsNotShownError(InvalidInputError):
    """A chat template does not show tools to the model, which would have to guess that there are any."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"the chat template does not show tools to the model: prompts are the same with and without "
            f"{', '.join(names)}. Take a model whose template shows them; or describe them in a system message of the "
            "task's own, and say so: rollouts.tools_in_messages = true"
        )
        self.names = tuple(names)

    def __reduce__(self) -> tuple[type[ToolsNotShownError], tuple[Sequence[str]]]:
        """A sampler passes it from one process to another."""
        return ToolsNotShownError, (self.names,)


class StopTokenError(TemplateError):
    """No id ends a turn of some kind: it would be sampled up to `max_tokens`, and count as truncated."""

    def __init__(self, kinds: str) -> None:
        super().__init__(
            f"stop_token_ids must have an id that ends a turn of {kinds}, got none: the tokenizer's eos_token and the "
            "ids of generation_config.json are missing, or the template also writes them inside a turn that continues. "
            "Pass the id that the model samples last: stop_token_ids=[...] of TemplateRenderer or load_renderer, "
            "rollouts.sampling.stop_token_ids in a run, or eos_token_id in generation_config.json"
        )
        self.kinds = kinds

    def __reduce__(self) -> tuple[type[StopTokenError], tuple[str]]:
        """An audit passes it from one process to another."""
        return StopTokenError, (self.kinds,)


class InvariantError(UnbrokenError):
    """Token ids, masks, logprobs or policy versions contradict each other.

    Raised before anything is trained on them. Nothing is padded, cut or filled in to make it fit.
    """


class EchoError(InvariantError):
    """The engine reports a prompt that differs from the one it was sent (I3)."""


class PolicyMismatchError(InvariantError):
    """The sampler's logprobs differ from the trainer's by more than rounding: they have two policies (I9)."""


class EngineError(UnbrokenError):
    """The engine is closed, stopped with an error, or does not support the call."""


class IncompleteWeightsError(EngineError):
    """An update of the weights ended half-way: the engine samples nothing until a whole version comes."""


class ServerError(EngineError):
    """A server reported a failure, or its answer cannot be read."""

    status: int | None = None
    """Of the answer; None if there was none, or it is told by another kind of error."""


class ServerBusyError(ServerError):
    """A server's queue was full at every attempt."""


class ServerUnreachableError(ServerError):
    """A server could not be connected to at any attempt."""


class ServerBehindError(ServerError):
    """A server answered with older weights than those published to it: it was restarted."""


class EnvServerError(UnbrokenError):
    """A server of an environment or of its tools cannot be reached, or does not answer as its protocol says."""


class TaskError(UnbrokenError):
    """The environment or the verifier of a terminal task failed, through no fault of the agent: there is no reward."""


class StoreError(UnbrokenError):
    """A store cannot be written or read: a full disk, a lost connection, a folder that another process uses."""


class NoStoreError(StoreError):
    """A database has no store of this kind."""


class UnknownSessionError(StoreError):
    """There is no session of this id, or no longer."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"there is no session {session_id!r}: it was deleted, or never created in this store")
        self.session_id = session_id


class SessionEndedError(StoreError):
    """The session is finished or expired: it takes no turns, and no other end."""

    def __init__(self, session_id: str, status: str) -> None:
        super().__init__(f"session {session_id!r} must be open, but is {status}: create another one")
        self.session_id = session_id
        self.status = status


class NotOwnerError(StoreError):
    """The session is owned by another gateway, which took it over, or by none."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"session {session_id!r} must be owned by who writes to it: acquire it first")
        self.session_id = session_id


class WeightsError(UnbrokenError):
    """Weights that cannot be written or sent, or that changed on the way. The engines keep their version."""


class CheckpointError(UnbrokenError):
    """A checkpoint that cannot be written, is incomplete, was changed, or belongs to another trainer."""


class ExportError(UnbrokenError):
    """A model that cannot be written as a folder for transformers and vLLM, or not be sent to the hub."""


class MetricsError(UnbrokenError):
    """Metrics that cannot be written, for example because the disk is full."""


class RolloutError(UnbrokenError):
    """Every rollout of a step failed, or steps in a row taught nothing: more steps would not remove the cause."""


class OutageError(UnbrokenError):
    """Engines were unavailable, or behind, for longer than the run waits; the message says how to continue."""


class TrainingError(UnbrokenError):
    """The loss or gradients of an update are NaN or infinite, and it was not applied; or another process failed."""
