"""Compares the provenance of training data with what this server sampled.

    sampled by sequence s1           prompt [5 6 7]    ids [8 9 2]    logprobs [-.1 -.2 -.3]    versions [3 3 4]
    the datum's model_input          [5 6 7 8 9]       spans: prompt of s1 from 0, 3 ids; sampled in s1 from 0, 2 ids
    the datum's target_tokens        [6 7 8 9 2]       spans: prompt of s1 from 1, 2 ids; sampled in s1 from 0, 3 ids

Each span is compared id by id, and the spans of a field cover it exactly. Before a sampled target model_input has what
it was sampled after: the prompt, and the ids sampled before it. `logprobs` given for sampled targets are those of the
sampling, or they are counted. A datum without spans is looked up by its ids, and counted as unproven if no sequence, or
more than one, has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unbroken.errors import InvalidInputError
from unbroken.tinker.data import Datum
from unbroken.tinker.options import ProvenancePolicy
from unbroken.tinker.store import RecordedSequence, TinkerStore, hash_content
from unbroken.tinker.wire import ClaimedDatum, ProvenanceClaim
from unbroken.types import TokenIds

_SAMPLED = "sampled"


_COUNTED = (
    "proven", "matched", "unproven", "false_spans", "false_contexts", "logprobs_changed", "unsampled_trained",
    "other_model",
)  # fmt: skip
"""What is counted of a request's targets (docs/tinker.md says what each means)."""


class ProvenanceCheck:
    """Checks the data of one request. Blocks: it reads the store."""

    def __init__(
        self, store: TinkerStore, policy: ProvenancePolicy, *, owner: str, model_id: str, version: int, loss: str
    ) -> None:
        """`version` is that of the model `model_id` of `owner`, which is to be trained with `loss`."""
        self._store = store
        self._policy = policy
        self._owner = owner
        self._model_id = model_id
        self._version = version
        self._loss = loss
        self._fills = loss == "stable_reinforce"
        self._known: dict[str, RecordedSequence] = {}
        self._counts = Counter(dict.fromkeys(_COUNTED, 0))
        self._difference = 0.0
        """The largest difference of a given logprob from that of the sampling."""
        self._lags: Counter[int] = Counter()
        """How many sampled targets of this model have weights that were so many versions older."""

    def check(self, data: Sequence[ClaimedDatum]) -> tuple[list[Datum], dict[str, float]]:
        """Check all data; returns what is to be trained, and the metrics of the answer.

        Data for stable_reinforce get the input `sampled`, 1 for each target that spans say was sampled, and the
        `logprobs` of the sampling if they have none.

        Raises:
            InvalidInputError: a span is not true, and the policy is to refuse it; the message names datum, span and
                position, and the id that was sampled there and the id that is given.
        """
        checked = []
        for index, each in enumerate(data):
            if _SAMPLED in each.datum.inputs:
                raise InvalidInputError(
                    f"data[{index}]: loss_fn_inputs[{_SAMPLED!r}] is made from spans, and not given"
                )
            if (each.input_claims or each.target_claims) and (self._fills or self._policy is not ProvenancePolicy.OFF):
                checked.append(self._check_spans(f"data[{index}]", each))
            else:
                if self._policy is not ProvenancePolicy.OFF:
                    self._match(each)
                checked.append(each.datum)
        return checked, {} if self._policy is ProvenancePolicy.OFF else self._make_metrics()

    def _make_metrics(self) -> dict[str, float]:
        """Named as the SDK adds those of several chunks up."""
        return {
            **{f"provenance_{name}:sum": float(number) for name, number in self._counts.items()},
            "provenance_logprobs_difference:max": self._difference,
            "provenance_version_lag:max": float(max(self._lags, default=0)),
            "provenance_version_lag:mean": sum(lag * n for lag, n in self._lags.items()) / max(self._lags.total(), 1),
        }

    def _check_spans(self, where: str, each: ClaimedDatum) -> Datum:
        datum = each.datum
        number = len(datum.input_ids)
        targets = datum.targets if datum.targets is not None and datum.targets.ndim == 1 else None
        sampled, logprobs = np.zeros(number, np.float32), np.zeros(number, np.float32)
        is_dro = self._loss == "dro"  # whose penalty is of all positions
        used = datum.inputs.get("weights", np.ones(number, np.float32) if is_dro else None)
        used = used if is_dro else datum.inputs.get("advantages", used)
        used = used if used is not None and used.shape == sampled.shape else None
        # Loops write 0 for targets that the loss does not use.
        is_blank = None if targets is None or used is None else (targets == 0) & (used == 0)
        list(self._find_true(f"{where}.model_input", datum.input_ids, each.input_claims))
        known: dict[str, tuple[TokenIds, int]] = {}
        fields = f"{where}.loss_fn_inputs"
        for span, start, claim, sequence in self._find_true(fields, targets, each.target_claims, number, is_blank):
            if not claim.sampled:
                continue
            if targets is not None and not self._has_context(span, datum.input_ids, start, claim, known):
                continue
            sampled[start : start + claim.length] = 1
            logprobs[start : start + claim.length] = sequence.logprobs[claim.offset : claim.offset + claim.length]
            if targets is not None:
                self._counts["proven"] += claim.length
                self._compare_logprobs(datum.inputs, start, sequence, claim.offset, claim.length)
        if targets is None:
            self._counts["unproven"] += number
        if used is not None:
            self._counts["unsampled_trained"] += int(((used != 0) & (sampled == 0)).sum())
        if not self._fills:
            return datum
        return replace(datum, inputs={"logprobs": logprobs, **datum.inputs, _SAMPLED: sampled})

    def _find_true(
        self,
        where: str,
        ids: NDArray[Any] | None,
        claims: Sequence[ProvenanceClaim],
        length: int = 0,
        is_blank: NDArray[np.bool_] | None = None,
    ) -> Iterator[tuple[str, int, ProvenanceClaim, RecordedSequence]]:
        """Check the spans of one field, whose `ids` are None if there are several a position. Yields those that are
        true, each with its name and its start. Where `is_blank`, a span of a prompt says nothing of the id.
        """
        length = length if ids is None else len(ids)
        covered = sum(claim.length for claim in claims)
        if covered != length:
            self._refuse(f"{where}: provenance spans must cover the field's {length} positions exactly, got {covered}")
            return
        start = 0
        for number, claim in enumerate(claims):
            place, span = slice(start, start + claim.length), f"{where}, span {number}"
            given = None if ids is None else ids[place]
            blank = None if claim.sampled or is_blank is None else is_blank[place]
            sequence = self._check_claim(span, claim, given, start, blank)
            if sequence is not None and claim.length:
                yield span, start, claim, sequence
            start += claim.length

    def _has_context(
        self, where: str, ids: TokenIds, start: int, claim: ProvenanceClaim, known: dict[str, tuple[TokenIds, int]]
    ) -> bool:
        """Whether `ids`, the datum's input, have before the targets of a span what those were sampled after. `known` is
        filled: of each sequence its prompt and sampled ids, and how many of them the input begins with.
        """
        sequence = self._known[claim.sequence_id]
        if claim.sequence_id not in known:
            whole = np.concatenate([sequence.prompt_ids, sequence.ids])
            both = min(len(whole), len(ids))
            wrong = np.flatnonzero(whole[:both] != ids[:both])
            known[claim.sequence_id] = whole, int(wrong[0]) if len(wrong) else both
        whole, same = known[claim.sequence_id]
        wanted, given = len(sequence.prompt_ids) + claim.offset, start + 1
        more = claim.length - 1 if wanted == given else 0
        place = min(same, wanted + more, given + more)
        if place == wanted + more == given + more:
            return True
        right = f"id {whole[place]}" if place < wanted + more else "no id"
        wrong_id = f"id {ids[place]}" if place < given + more else "no id"
        self._refuse(
            f"{where}, position {min(max(start, place), start + more)}: the sampled ids of {claim.sequence_id!r} from "
            f"{claim.offset} came after {wanted} ids, its prompt and those sampled before, and here come after {given} "
            f"of model_input: at position {place} the sequence has {right}, and {wrong_id} was given",
            "false_contexts",
        )
        return False

    def _check_claim(
        self,
        where: str,
        claim: ProvenanceClaim,
        given: NDArray[Any] | None,
        start: int,
        blank: NDArray[np.bool_] | None,
    ) -> RecordedSequence | None:
        """The sequence of a span that is true; None for a false one that is only counted."""
        what = "sampled ids" if claim.sampled else "prompt ids"
        sequence = self._find(claim.sequence_id)
        if sequence is None:
            self._refuse(
                f"{where}: this server has sampled no sequence {claim.sequence_id[:200]!r} for this key, or removed it "
                f"after {self._store.keep_days:g} days (--tinker-keep-days)"
            )
            return None
        source = sequence.ids if claim.sampled else sequence.prompt_ids
        if claim.offset + claim.length > len(source):
            self._refuse(
                f"{where}: the {what} of {claim.sequence_id!r} have {len(source)} positions, and the span claims "
                f"{claim.length} from {claim.offset}"
            )
            return None
        if given is not None:
            wanted = source[claim.offset : claim.offset + claim.length]
            wrong = np.flatnonzero((wanted != given) if blank is None else (wanted != given) & ~blank)
            if len(wrong):
                place = int(wrong[0])
                self._refuse(
                    f"{where}, position {start + place}: the {what} of {claim.sequence_id!r} have id "
                    f"{int(wanted[place])} at {claim.offset + place}, and id {int(given[place])} was given "
                    f"({len(wrong)} of the span's {claim.length} ids differ)"
                )
                return None
        return sequence

    def _find(self, sequence_id: str) -> RecordedSequence | None:
        if sequence_id not in self._known:
            found = self._store.find_sequence(sequence_id, owner=self._owner)
            if found is None:
                return None
            self._known[sequence_id] = found
        return self._known[sequence_id]

    def _refuse(self, problem: str, counted: str = "false_spans") -> None:
        if self._policy is ProvenancePolicy.REFUSE:
            raise InvalidInputError(f"{problem}. Nothing of this request was trained (--tinker-provenance refuse)")
        self._counts[counted] += 1

    def _match(self, each: ClaimedDatum) -> None:
        """Look a datum without spans up by its ids."""
        datum = each.datum
        if datum.targets is None or datum.targets.ndim != 1:
            self._counts["unproven"] += len(datum.input_ids)
            return
        last = datum.targets[-1:].astype(np.int32)
        found = self._store.find_by_content(hash_content(datum.input_ids, last), owner=self._owner)
        number = min(len(found[0].ids), len(datum.targets)) if len(found) == 1 else 0
        if not number or not np.array_equal(found[0].ids[-number:], datum.targets[-number:]):
            self._counts["unproven"] += len(datum.targets)
            return
        offset = len(found[0].ids) - number
        self._counts["matched"] += number
        self._counts["unproven"] += len(datum.targets) - number
        self._compare_logprobs(datum.inputs, len(datum.targets) - number, found[0], offset, number)

    def _compare_logprobs(
        self, inputs: Mapping[str, NDArray[Any]], start: int, sequence: RecordedSequence, offset: int, length: int
    ) -> None:
        """Compare the logprobs of sampled targets with those of the sampling, and look at their versions."""
        given = inputs.get("logprobs")
        if given is not None and given.ndim == 1 and start + length <= len(given):
            difference = np.abs(given[start : start + length] - sequence.logprobs[offset : offset + length])
            self._counts["logprobs_changed"] += int((difference > 0).sum())
            self._difference = max(self._difference, float(difference.max(initial=0)))
        if sequence.model_id != self._model_id:
            self._counts["other_model"] += length
            return
        for first, stop, version in sequence.version_spans:
            if (number := min(stop, offset + length) - max(first, offset)) > 0:
                self._lags[self._version - version] += number
