"""What changes the logits that ids are sampled from, as a function of the ids before them (docs/design/0059).

Temperature, top-k, top-p and min-p come after it. A trainer that has the ids and these numbers changes its own logits
in the same way, so nothing is recorded for each id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from unbroken.errors import InvariantError


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitControls:
    """How the logits of one completion were changed, in this order, which is vLLM's; see `SamplingParams`.

    `min_tokens` and `bad_words_ids`, presence and frequency penalties depend on the completion's own ids so far, the
    repetition penalty on all ids before. A prompt 1 2 and the completion 3 4 5, with `min_tokens` 2, `stop_token_ids` 9
    and the bad word 4 3:

        sampled id            3      4        5
        impossible            9      9        3
        presence counts       -      3        3 4
        repetition counts     1 2    1 2 3    1 2 3 4
    """

    allowed_token_ids: tuple[int, ...] = ()
    """All others are impossible; empty: none is."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Impossible before `min_tokens`; empty without it."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def forbids(self) -> bool:
        """Whether some ids may be impossible."""
        return bool(self.allowed_token_ids or self.min_tokens or self.bad_words_ids)

    @property
    def largest_id(self) -> int:
        """The largest id that it names; -1 if none."""
        named = [token_id for token_id, _ in self.logit_bias]
        return max([*named, *self.allowed_token_ids, *self.stop_token_ids, *sum(self.bad_words_ids, ())], default=-1)

    def to_json(self) -> dict[str, Any]:
        """The fields that change anything, as JSON has them."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: _to_lists(value) for name, (value, default) in values.items() if value != default}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LogitControls | None:
        """Read what `to_json` wrote; None if it changes nothing. Other keys are left alone."""
        names = [field.name for field in fields(cls)]
        controls = cls(**{name: _to_tuples(values[name]) for name in names if name in values})
        return None if controls == cls() else controls


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSpan:
    """The ids [start, stop) of a row are a completion that was sampled under these controls, or the start of one."""

    start: int
    stop: int
    controls: LogitControls

    def __post_init__(self) -> None:
        if not 0 < self.start < self.stop:
            raise InvariantError(f"a control span must satisfy 0 < start < stop, got [{self.start}, {self.stop})")

    def to_json(self) -> dict[str, Any]:
        """Its bounds and controls, as JSON has them."""
        return {"start": self.start, "stop": self.stop, "controls": self.controls.to_json()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ControlSpan:
        """Read what `to_json` wrote."""
        controls = LogitControls.from_json(values["controls"])
        if controls is None:
            raise InvariantError(f"controls of [{values['start']}, {values['stop']}) must change something")
        return cls(start=values["start"], stop=values["stop"], controls=controls)


def _to_lists(value: Any) -> Any:
    return [_to_lists(item) for item in value] if isinstance(value, tuple) else value


def _to_tuples(value: Any) -> Any:
    return tuple(_to_tuples(item) for item in value) if isinstance(value, list) else value
