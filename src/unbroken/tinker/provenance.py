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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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


class ProvenanceCheck:
    """Checks the data of one request. Blocks: it reads the store."""

    def __init__(self, store: TinkerStore, policy: ProvenancePolicy, run: TrainingRun, *, loss: str) -> None:
        """For data that `run` is to be trained on with `loss`."""
        self._store, self._policy, self._run, self._loss = store, policy, run, loss
        self._has_ratio = loss in LOSSES and "logprobs" in LOSSES[loss].needs
        self._known: dict[str, RecordedSequence | None] = {}
        self._begun: dict[str, tuple[TokenIds, int]] = {}
        """For the datum at hand: the prompt and the sampled ids of a sequence, and how many of them it begins with."""
        self._counts = Counter(dict.fromkeys(_COUNTED, 0))
        self._difference = 0.0
        """The largest difference of a given logprob from that of the sampling."""
        self._lags: Counter[int] = Counter()
        """How many sampled targets of this model have weights that were so many versions older."""

    def check(self, data: Sequence[Datum]) -> tuple[list[Datum], dict[str, float]]:
        """Check all data; returns what is to be trained, and the metrics of the answer. Data for stable_reinforce get
        the input `sampled`, 1 for each target that spans say was sampled, and `logprobs` if they have none.
        """
        is_off, fills = self._policy is ProvenancePolicy.OFF, self._loss == "stable_reinforce"
        checked = []
        for index, datum in enumerate(data):
            if SAMPLED in datum.inputs:
                raise InvalidInputError(f"data[{index}].loss_fn_inputs.{SAMPLED} is made from spans, and not given")
            if (datum.input_claims or datum.target_claims) and (fills or not is_off):
                found = self._check_spans(f"data[{index}]", _make_flat(datum))
                datum = replace(datum, inputs={**found, **datum.inputs}) if fills else datum
            elif self._policy is ProvenancePolicy.REQUIRE:
                rule = "must have spans of model_input and of loss_fn_inputs (Datum.with_provenance), got none"
                raise InvalidInputError(f"data[{index}] {rule} (--tinker-provenance require)")
            elif not is_off:
                self._match(_make_flat(datum))
            checked.append(datum)
        metrics = {  # named as the SDK adds those of several chunks up
            **{f"provenance_{name}:sum": float(number) for name, number in self._counts.items()},
            "provenance_logprobs_difference:max": self._difference,
            "provenance_version_lag:max": float(max(self._lags, default=0)),
            "provenance_version_lag:mean": sum(lag * n for lag, n in self._lags.items()) / max(self._lags.total(), 1),
        }
        return checked, {} if is_off else metrics

    def _check_spans(self, where: str, datum: Datum) -> dict[str, NDArray[np.float32]]:
        """Check a datum's spans; returns which of its targets were sampled, and with which logprobs."""
        number, inputs = len(datum.input_ids), datum.inputs
        targets = datum.targets if datum.targets is not None and datum.targets.ndim == 1 else None
        if targets is None and self._policy is ProvenancePolicy.REQUIRE:
            rule = "target_tokens must have one id a position, which its span is compared with"
            raise InvalidInputError(f"{where}.loss_fn_inputs.{rule} (--tinker-provenance require)")
        sampled, logprobs = np.zeros(number, np.float32), np.zeros(number, np.float32)
        used = self._find_used(inputs, number)
        # Loops write 0 for targets that the loss does not use.
        is_blank = np.zeros(number, np.bool_) if targets is None or used is None else (targets == 0) & ~used
        self._begun = {}
        list(self._find_true(f"{where}.model_input", datum.input_ids, datum.input_claims, is_blank & False))
        found = self._find_true(f"{where}.loss_fn_inputs", targets, datum.target_claims, is_blank)
        for span, start, claim, sequence in found:
            if isinstance(claim, types.PromptProvenanceSpan) or (
                targets is not None and not self._has_context(span, start, claim, sequence, datum.input_ids)
            ):
                continue
            place = slice(start, start + claim.length)
            sampled[place] = 1
            logprobs[place] = sequence.sampled.rollout_logprobs[claim.offset : claim.offset + claim.length]
            if targets is not None:
                self._check_distribution(span, sequence, is_used=used is None or bool(used[place].any()))
                self._count("proven", inputs, start, sequence, claim.offset, claim.length)
        self._counts["unproven"] += number if targets is None else 0
        self._counts["unsampled_trained"] += 0 if used is None else int((used & (sampled == 0)).sum())
        return {"logprobs": logprobs, SAMPLED: sampled}

    def _find_used(self, inputs: Mapping[str, NDArray[Any]], number: int) -> NDArray[np.bool_] | None:
        """[T] where the loss depends on a target's logprob; None if its inputs do not say, or have another shape."""
        used = inputs.get("advantages", inputs.get("weights"))
        if self._loss == "dro":  # whose penalty is of all positions
            used = inputs.get("weights", np.ones(number))
        if used is None or used.shape != (number,):
            return None
        mask = inputs.get("sequence_ratio_mask", np.zeros(number))  # of gspo, whose one ratio has all of these
        return (used != 0) | (mask != 0) if mask.shape == (number,) else None

    def _check_distribution(self, span: str, sequence: RecordedSequence, *, is_used: bool) -> None:
        """Refuse what was not sampled from a model's own distribution for a loss that compares it with the trained
        one's. A loss without a ratio has no such distribution: it is counted.
        """
        is_own = sequence.sampling == {}
        if is_own or not self._has_ratio or not (is_used or self._loss == "stable_reinforce"):
            return
        if self._policy in _REFUSING:
            changes = sequence.sampling
            how = "by an earlier release, which did not record how" if changes is None else f"with {dict(changes)}"
            raise InvalidInputError(
                f"{span}: the ids of {sequence.sequence_id!r} were sampled {how}, and {self._loss} has the ratio to "
                "logprobs at temperature 1 of the whole vocabulary: sample without top_k, top_p, min_p, penalties and "
                f"formats. {self._untrained}"
            )

    @property
    def _untrained(self) -> str:
        return f"Nothing of this request was trained (--tinker-provenance {self._policy.value})"

    def _find_true(
        self, where: str, ids: NDArray[Any] | None, claims: Sequence[ProvenanceClaim], is_blank: NDArray[np.bool_]
    ) -> Iterator[tuple[str, int, ProvenanceClaim, RecordedSequence]]:
        """Check the spans of one field, whose `ids` are None if there are several a position. Yields those that are
        true, each with its name and its start. Where `is_blank`, a span of a prompt says nothing of the id.
        """
        covered, stop = sum(claim.length for claim in claims), 0
        if covered != len(is_blank):
            rule = f"provenance spans must cover the field's {len(is_blank)} positions exactly"
            self._refuse(f"{where}: {rule}, got {covered}")
            return
        for number, claim in enumerate(claims):
            span, start, stop, name = f"{where}, span {number}", stop, stop + claim.length, claim.sequence_id
            if name not in self._known:
                self._known[name] = self._store.find_sequence(name, owner=self._run.owner)
            if (sequence := self._known[name]) is None:
                self._refuse(
                    f"{span}: this server has sampled no sequence {name[:200]!r} for this key, or removed it after "
                    f"{self._store.keep_days:g} days (--tinker-keep-days)"
                )
                continue
            is_sampled = isinstance(claim, types.SampledProvenanceSpan)
            of, source = ("sampled", sequence.sampled.completion_ids) if is_sampled else ("prompt", sequence.prompt_ids)
            wanted = source[claim.offset : claim.offset + claim.length]
            if len(wanted) < claim.length:
                self._refuse(
                    f"{span}: the {of} ids of {name!r} have {len(source)} positions, and the span claims "
                    f"{claim.length} from {claim.offset}"
                )
                continue
            given = wanted if ids is None else ids[start:stop]
            wrong = np.flatnonzero((wanted != given) & (~is_blank[start:stop] | is_sampled)).tolist()
            if wrong:
                self._refuse(
                    f"{span}, position {start + wrong[0]}: the {of} ids of {name!r} have id {wanted[wrong[0]]} at "
                    f"{claim.offset + wrong[0]}, and id {given[wrong[0]]} was given ({len(wrong)} of the span's "
                    f"{claim.length} ids differ)"
                )
            elif claim.length:
                yield span, start, claim, sequence

    def _has_context(
        self, span: str, start: int, claim: ProvenanceClaim, sequence: RecordedSequence, ids: TokenIds
    ) -> bool:
        """Whether `ids`, the datum's input, have before the targets of a span what those were sampled after."""
        if claim.sequence_id not in self._begun:
            whole = np.concatenate([sequence.prompt_ids, sequence.sampled.completion_ids])
            both = min(len(whole), len(ids))
            same = next(iter(np.flatnonzero(whole[:both] != ids[:both]).tolist()), both)
            self._begun[claim.sequence_id] = whole, same
        whole, same = self._begun[claim.sequence_id]
        wanted, given = len(sequence.prompt_ids) + claim.offset, start + 1
        more = claim.length - 1 if wanted == given else 0
        place = min(same, wanted + more, given + more)
        if place == wanted + more == given + more:
            return True
        right = f"id {whole[place]}" if place < wanted + more else "no id"
        wrong = f"id {ids[place]}" if place < given + more else "no id"
        self._refuse(
            f"{span}, position {min(max(start, place), start + more)}: the sampled ids of {claim.sequence_id!r} from "
            f"{claim.offset} came after {wanted} ids, its prompt and those sampled before, and here come after {given} "
            f"of model_input: at position {place} the sequence has {right}, and {wrong} was given",
            "false_contexts",
        )
        return False

    def _refuse(self, problem: str, counted: str = "false_spans") -> None:
        if self._policy in _REFUSING:
            raise InvalidInputError(f"{problem}. {self._untrained}")
        self._counts[counted] += 1

    def _match(self, datum: Datum) -> None:
        """Look a datum without spans up by its ids."""
        targets, number = datum.targets, 0
        if targets is not None and targets.ndim == 1:
            content = hash_content(datum.input_ids, targets[-1:])
            found = self._store.find_by_content(content, owner=self._run.owner)
            ids = found[0].sampled.completion_ids if len(found) == 1 else targets[:0]
            start, offset = max(len(targets) - len(ids), 0), max(len(ids) - len(targets), 0)
            if len(ids) and np.array_equal(ids[offset:], targets[start:]):
                number = len(targets) - start
                self._count("matched", datum.inputs, start, found[0], offset, number)
        self._counts["unproven"] += len(datum.input_ids) - number

    def _count(
        self, name: str, inputs: Mapping[str, NDArray[Any]], start: int, of: RecordedSequence, offset: int, length: int
    ) -> None:
        """Count sampled targets, compare their logprobs with those of the sampling, and look at their versions."""
        is_ours, is_own = of.model_id == self._run.model_id, of.sampling == {}
        self._counts[name if is_ours and is_own else "other_model" if is_own else "other_distribution"] += length
        given, place = inputs.get("logprobs"), slice(offset, offset + length)
        if given is not None and given.ndim == 1 and start + length <= len(given):
            difference = np.abs(given[start : start + length] - of.sampled.rollout_logprobs[place])
            self._counts["logprobs_changed"] += int((difference > 0).sum())
            self._difference = max(self._difference, float(difference.max(initial=0)))
        if not is_ours:
            return
        for each in of.sampled.version_spans:
            if (number := min(each.stop, offset + length) - max(each.start, offset)) > 0:
                self._lags[self._run.version - each.policy_version] += number


def _make_flat(datum: Datum) -> Datum:
    """The datum with targets [T, 1], which are one id a position, as [T], and so the inputs of their shape."""
    if datum.targets is None or datum.targets.shape[1:] != (1,):
        return datum
    inputs = {name: each[:, 0] if each.shape == datum.targets.shape else each for name, each in datum.inputs.items()}
    return replace(datum, targets=datum.targets[:, 0], inputs=inputs)
