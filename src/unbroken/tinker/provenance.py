"""Compares the provenance of training data with what this server sampled.

    sampled by sequence s1           prompt [5 6 7]    ids [8 9 2]    logprobs [-.1 -.2 -.3]    versions [3 3 4]
    the datum's model_input          [5 6 7 8 9]       spans: prompt of s1 from 0, 3 ids; sampled in s1 from 0, 2 ids
    the datum's target_tokens        [6 7 8 9 2]       spans: prompt of s1 from 1, 2 ids; sampled in s1 from 0, 3 ids

Each span is compared id by id, and the spans of a field cover it exactly. Before a sampled target model_input has what
it was sampled after: the prompt, and the ids sampled before it. It was sampled by this run's weights, at a known
version, and from their own distribution: temperature 1, with nothing cut, penalised or constrained, because of these
the losses compute logprobs. `logprobs` given for sampled targets are those of the sampling, or they are counted. A
datum without spans is looked up by its ids, and counted as unproven if no sequence, or more than one, has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinker import types

from unbroken.errors import InvalidInputError
from unbroken.tinker.losses import LOSSES, SAMPLED, Datum, ProvenanceClaim
from unbroken.tinker.options import ProvenancePolicy
from unbroken.tinker.sessions import TrainingRun
from unbroken.tinker.store import RecordedSequence, TinkerStore, hash_content
from unbroken.types import TokenIds

_COUNTED = (
    "proven", "matched", "unproven", "false_spans", "false_contexts", "logprobs_changed", "unsampled_trained",
    "other_model", "other_distribution",
)  # fmt: skip
"""What is counted of a request's targets (docs/tinker.md says what each means)."""
_REFUSING = (ProvenancePolicy.REFUSE, ProvenancePolicy.REQUIRE)
_SAMPLED_LOSS = "stable_reinforce"
"""The loss that trains sampled targets alone: the server tells it which ones these are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """A claim at its place in a field."""

    name: str
    """For errors: `data[0].loss_fn_inputs, span 1`."""
    claim: ProvenanceClaim
    start: int

    @property
    def place(self) -> slice:
        """The positions of the field that it is about."""
        return slice(self.start, self.start + self.claim.length)

    @property
    def source(self) -> slice:
        """The positions of the prompt, or of the sampled ids, that they are said to be from."""
        return slice(self.claim.offset, self.claim.offset + self.claim.length)

    @property
    def is_sampled(self) -> bool:
        return isinstance(self.claim, types.SampledProvenanceSpan)


class _Metrics:
    """What is counted of the data of a request that `run` is to be trained on."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self.counts = Counter(dict.fromkeys(_COUNTED, 0))
        self._difference = 0.0
        """The largest difference of a given logprob from that of the sampling."""
        self._lags: Counter[int] = Counter()
        """How many sampled targets of this model have weights that were so many versions older."""

    def add(self, kind: str, logprobs: NDArray[Any] | None, of: RecordedSequence, place: slice, source: slice) -> None:
        """Count the targets at `place`, which are the sampled ids `source` of a sequence, as `kind`.

        `logprobs` [T] are those that the datum gives; None, or another shape, is refused or not used by the loss.
        """
        is_ours = of.model_id == self._run.model_id
        if of.sampling != {}:
            kind = "other_distribution"
        elif not is_ours:
            kind = "other_model"
        self.counts[kind] += place.stop - place.start
        if logprobs is not None and logprobs.ndim == 1 and place.stop <= len(logprobs):
            difference = np.abs(logprobs[place] - of.sampled.rollout_logprobs[source])
            self.counts["logprobs_changed"] += int((difference > 0).sum())
            self._difference = max(self._difference, float(difference.max(initial=0)))
        if is_ours:  # versions of other models are not steps of this one
            self._count_lags(of, source)

    def _count_lags(self, of: RecordedSequence, source: slice) -> None:
        for span in of.sampled.version_spans:
            number = min(span.stop, source.stop) - max(span.start, source.start)
            if number > 0:
                self._lags[self._run.version - span.policy_version] += number

    def to_answer(self) -> dict[str, float]:
        """The metrics of the answer, named as the SDK adds those of several chunks up."""
        return {
            **{f"provenance_{name}:sum": float(number) for name, number in self.counts.items()},
            "provenance_logprobs_difference:max": self._difference,
            "provenance_version_lag:max": float(max(self._lags, default=0)),
            "provenance_version_lag:mean": sum(lag * n for lag, n in self._lags.items()) / max(self._lags.total(), 1),
        }


class ProvenanceCheck:
    """Checks the data of one request. Blocks: it reads the store."""

    def __init__(self, store: TinkerStore, policy: ProvenancePolicy, run: TrainingRun, *, loss: str) -> None:
        """For data that `run` is to be trained on with `loss`."""
        self._store, self._policy, self._run, self._loss = store, policy, run, loss
        self._has_ratio = loss in LOSSES and "logprobs" in LOSSES[loss].needs
        self._fills = loss == _SAMPLED_LOSS
        self._known: dict[str, RecordedSequence | None] = {}
        self._beginnings: dict[str, tuple[TokenIds, int]] = {}
        """Of the datum at hand, by the names of sequences."""
        self._metrics = _Metrics(run)

    def check(self, data: Sequence[Datum]) -> tuple[list[Datum], dict[str, float]]:
        """Check all data; returns what is to be trained, and the metrics of the answer. Data for stable_reinforce get
        the input `sampled`, 1 for each target that spans say was sampled, and `logprobs` if they have none.
        """
        checked = [self._check_datum(f"data[{index}]", datum) for index, datum in enumerate(data)]
        return checked, {} if self._policy is ProvenancePolicy.OFF else self._metrics.to_answer()

    def _check_datum(self, where: str, datum: Datum) -> Datum:
        if SAMPLED in datum.inputs:
            raise InvalidInputError(f"{where}.loss_fn_inputs.{SAMPLED} is made from spans, and not given")
        is_off = self._policy is ProvenancePolicy.OFF
        if datum.input_claims or datum.target_claims:
            if is_off and not self._fills:
                return datum
            found = self._check_spans(where, _make_flat(datum))
            return replace(datum, inputs={**found, **datum.inputs}) if self._fills else datum
        if self._policy is ProvenancePolicy.REQUIRE:
            rule = "must have spans of model_input and of loss_fn_inputs (Datum.with_provenance), got none"
            raise InvalidInputError(f"{where} {rule} (--tinker-provenance require)")
        if not is_off:
            self._match(_make_flat(datum))
        return datum

    def _check_spans(self, where: str, datum: Datum) -> dict[str, NDArray[np.float32]]:
        """Check a datum's spans; returns which of its targets were sampled, and with which logprobs."""
        num_positions, counts = len(datum.input_ids), self._metrics.counts
        self._beginnings = {}
        targets = self._get_targets(where, datum)
        used = self._find_used(datum.inputs, num_positions)
        for span in self._place_spans(f"{where}.model_input", datum.input_claims, num_positions):
            self._find_true(span, datum.input_ids, np.zeros(num_positions, np.bool_))
        sampled, logprobs = np.zeros(num_positions, np.float32), np.zeros(num_positions, np.float32)
        is_blank = _find_blanks(targets, used, num_positions)
        for span in self._place_spans(f"{where}.loss_fn_inputs", datum.target_claims, num_positions):
            sequence = self._find_sampled(span, targets, is_blank, datum.input_ids)
            if sequence is None:
                continue
            sampled[span.place] = 1
            logprobs[span.place] = sequence.sampled.rollout_logprobs[span.source]
            if targets is not None:
                self._check_distribution(span, sequence, is_used=used is None or bool(used[span.place].any()))
                self._metrics.add("proven", datum.inputs.get("logprobs"), sequence, span.place, span.source)
        counts["unproven"] += num_positions if targets is None else 0
        counts["unsampled_trained"] += 0 if used is None else int((used & (sampled == 0)).sum())
        return {"logprobs": logprobs, SAMPLED: sampled}

    def _find_sampled(
        self, span: _Span, targets: NDArray[np.int64] | None, is_blank: NDArray[np.bool_], input_ids: TokenIds
    ) -> RecordedSequence | None:
        """The sequence that a span of targets was sampled in, after the same ids as here; None for other spans."""
        sequence = self._find_true(span, targets, is_blank)
        if sequence is None or not span.is_sampled or span.claim.length == 0:
            return None
        # Without one target a position there is no id to look for: the span's claim is all that there is.
        has_context = targets is None or self._has_context(span, sequence, input_ids)
        return sequence if has_context else None

    def _get_targets(self, where: str, datum: Datum) -> NDArray[np.int64] | None:
        """[T] ids that spans can be compared with; None if there are several a position, or none."""
        if datum.targets is not None and datum.targets.ndim == 1:
            return datum.targets
        if self._policy is ProvenancePolicy.REQUIRE:
            rule = "target_tokens must have one id a position, which its span is compared with"
            raise InvalidInputError(f"{where}.loss_fn_inputs.{rule} (--tinker-provenance require)")
        return None

    def _find_used(self, inputs: Mapping[str, NDArray[Any]], number: int) -> NDArray[np.bool_] | None:
        """[T] where the loss depends on a target's logprob; None if its inputs do not say, or have another shape."""
        used = inputs.get("advantages", inputs.get("weights"))
        if self._loss == "dro":  # whose penalty is of all positions
            used = inputs.get("weights", np.ones(number))
        if used is None or used.shape != (number,):
            return None
        mask = inputs.get("sequence_ratio_mask", np.zeros(number))  # of gspo, whose one ratio has all of these
        return (used != 0) | (mask != 0) if mask.shape == (number,) else None

    def _place_spans(self, where: str, claims: Sequence[ProvenanceClaim], num_positions: int) -> list[_Span]:
        """The spans of one field, each at its place; none, and a refusal, if they do not cover the field."""
        covered = sum(claim.length for claim in claims)
        if covered != num_positions:
            rule = f"provenance spans must cover the field's {num_positions} positions exactly"
            self._refuse(f"{where}: {rule}, got {covered}")
            return []
        starts = accumulate((claim.length for claim in claims), initial=0)
        return [
            _Span(name=f"{where}, span {number}", claim=claim, start=start)
            for number, (claim, start) in enumerate(zip(claims, starts, strict=False))  # the last start is the end
        ]

    def _find_true(self, span: _Span, ids: NDArray[Any] | None, is_blank: NDArray[np.bool_]) -> RecordedSequence | None:
        """The sequence that a span names, if the field's `ids` are its ids; else None, and a refusal.

        `ids` are None if there are several a position. Where `is_blank`, a span of a prompt says nothing of the id.
        """
        claim = span.claim
        if (sequence := self._find_sequence(span)) is None:
            return None
        part, source = "prompt", sequence.prompt_ids
        if span.is_sampled:
            part, source = "sampled", sequence.sampled.completion_ids
        recorded = f"the {part} ids of {claim.sequence_id!r} have"
        wanted = source[span.source]
        if len(wanted) < claim.length:
            claimed = f"{claim.length} from {claim.offset}"
            self._refuse(f"{span.name}: {recorded} {len(source)} positions, and the span claims {claimed}")
            return None
        if span.is_sampled and not (is_sampled := sequence.sampled.sampled_mask[span.source]).all():
            # A turn of a gateway: ids that closed its reasoning have no logprob, and nothing may train them.
            first = claim.offset + int(is_sampled.argmin())
            self._refuse(
                f"{span.name}: {recorded} an id at {first} that was given, not sampled, to close its reasoning"
            )
            return None
        if ids is None:
            return sequence
        given = ids[span.place]
        differs = wanted != given
        if not span.is_sampled:
            differs &= ~is_blank[span.place]
        if not differs.any():
            return sequence
        first = int(differs.argmax())
        self._refuse(
            f"{span.name}, position {span.start + first}: {recorded} id {wanted[first]} at {claim.offset + first}, and "
            f"id {given[first]} was given ({differs.sum()} of the span's {claim.length} ids differ)"
        )
        return None

    def _find_sequence(self, span: _Span) -> RecordedSequence | None:
        """The sequence that a span names; None, and a refusal, if this server does not have it for this key."""
        name = span.claim.sequence_id
        if name not in self._known:
            self._known[name] = self._store.find_sequence(name, owner=self._run.owner)
        if self._known[name] is None:
            self._refuse(
                f"{span.name}: this server has sampled no sequence {name[:200]!r} for this key, or removed it after "
                f"{self._store.keep_days:g} days (--tinker-keep-days)"
            )
        return self._known[name]

    def _has_context(self, span: _Span, sequence: RecordedSequence, ids: TokenIds) -> bool:
        """Whether `ids`, the datum's input, have before the targets of a span what those were sampled after.

            prompt [5 6 7], sampled [8 9 2]; targets [6 7 8 9 2], whose span of sampled ids has 3 from position 2:
            8 was sampled after [5 6 7], and position 2 sees ids[:3]; 2 after [5 6 7 8 9], and position 4 sees ids[:5]

        If the first target has as many ids before it as when it was sampled, so have the others, and the last one's
        have all of them.
        """
        num_needed, num_given = len(sequence.prompt_ids) + span.claim.offset, span.start + 1
        whole, num_same = self._compare_beginning(sequence, ids)
        if num_needed == num_given:
            num_last = num_needed + span.claim.length - 1
            if num_same >= num_last:
                return True
            needed, given = whole[:num_last], ids[:num_last]
            position = max(span.start, num_same)  # the first target that has seen the id that differs
        else:  # every target has seen too much or too little: the error shows the first
            needed, given, position = whole[:num_needed], ids[:num_given], span.start
        place = min(num_same, len(needed), len(given))
        right, wrong = (f"id {each[place]}" if place < len(each) else "no id" for each in (needed, given))
        self._refuse(
            f"{span.name}, position {position}: the sampled ids of {span.claim.sequence_id!r} from {span.claim.offset} "
            f"came after {num_needed} ids, its prompt and those sampled before, and here come after {num_given} of "
            f"model_input: at position {place} the sequence has {right}, and {wrong} was given",
            "false_contexts",
        )
        return False

    def _compare_beginning(self, sequence: RecordedSequence, ids: TokenIds) -> tuple[TokenIds, int]:
        """The prompt and the sampled ids of a sequence, and with how many of them the datum begins.

        It is found once, as a datum may have a span of the same sequence for each of its positions.
        """
        name = sequence.sequence_id
        if name not in self._beginnings:
            whole = np.concatenate([sequence.prompt_ids, sequence.sampled.completion_ids])
            both = min(len(whole), len(ids))
            differs = whole[:both] != ids[:both]
            self._beginnings[name] = whole, int(differs.argmax()) if differs.any() else both
        return self._beginnings[name]

    def _check_distribution(self, span: _Span, sequence: RecordedSequence, *, is_used: bool) -> None:
        """Refuse what was not sampled from a model's own distribution for a loss that compares it with the trained
        one's. A loss without a ratio has no such distribution: it is counted.
        """
        is_own = sequence.sampling == {}
        if is_own or not self._has_ratio or not (is_used or self._fills):
            return
        if self._policy in _REFUSING:
            raise InvalidInputError(
                f"{span.name}: the ids of {sequence.sequence_id!r} were sampled with {dict(sequence.sampling)}, and "
                f"{self._loss} has the ratio to logprobs at temperature 1 of the whole vocabulary: sample without "
                f"top_k, top_p, min_p, penalties and formats. {self._untrained}"
            )

    @property
    def _untrained(self) -> str:
        return f"Nothing of this request was trained (--tinker-provenance {self._policy.value})"

    def _refuse(self, problem: str, counted: str = "false_spans") -> None:
        if self._policy in _REFUSING:
            raise InvalidInputError(f"{problem}. {self._untrained}")
        self._metrics.counts[counted] += 1

    def _match(self, datum: Datum) -> None:
        """Look a datum without spans up by its ids: its last targets are a sequence's, which was sampled after them."""
        num_matched, targets = 0, datum.targets
        if targets is not None and targets.ndim == 1:
            content = hash_content(datum.input_ids, targets[-1:])
            found = self._store.find_by_content(content, owner=self._run.owner)
            if len(found) == 1:  # of several, which one is meant is not known
                num_matched = self._count_matched(targets, datum.inputs.get("logprobs"), found[0])
        self._metrics.counts["unproven"] += len(datum.input_ids) - num_matched

    def _count_matched(self, targets: NDArray[np.int64], logprobs: NDArray[Any] | None, of: RecordedSequence) -> int:
        """Count the targets that are the last ids of a sequence: all that both have, or none."""
        ids = of.sampled.completion_ids
        number = min(len(ids), len(targets))
        place, source = slice(len(targets) - number, len(targets)), slice(len(ids) - number, len(ids))
        if number == 0 or not np.array_equal(ids[source], targets[place]):
            return 0
        self._metrics.add("matched", logprobs, of, place, source)
        return number


def _find_blanks(
    targets: NDArray[np.int64] | None, used: NDArray[np.bool_] | None, num_positions: int
) -> NDArray[np.bool_]:
    """[T] where a target says nothing: training loops write 0 for targets that the loss does not use."""
    if targets is None or used is None:
        return np.zeros(num_positions, np.bool_)
    is_blank: NDArray[np.bool_] = (targets == 0) & ~used
    return is_blank


def _make_flat(datum: Datum) -> Datum:
    """The datum with targets [T, 1], which are one id a position, as [T], and so the inputs of their shape."""
    if datum.targets is None or datum.targets.shape[1:] != (1,):
        return datum
    inputs = {name: each[:, 0] if each.shape == datum.targets.shape else each for name, each in datum.inputs.items()}
    return replace(datum, targets=datum.targets[:, 0], inputs=inputs)
