"""Data of the Tinker SDK with provenance spans, of a gateway's session or of what the SDK itself sampled.

    rows = client.sessions.samples(session_id, advantage=0.5)                    agents by URL feed a user's own loop
    data = make_data(session_id, rows, client.sessions.tree(session_id))

    sampled = sampling_client.sample(prompt, num_samples=2, sampling_params=params).result()
    data = make_data(prompt, sampled.sequences, [0.5, -0.5])                     an advantage for each sequence

    training_client.forward_backward(data, "importance_sampling")

Each sampled node of the session's tree is a sequence, named `SESSION/NODE`. Worked example, a row of two turns:

    node        0 0 1 1 2 2 3         0 and 2 were given, 1 and 3 sampled
    token_ids   1 2 3 4 5 6 7
    input       1 2 3 4 5 6           prompt of S/1 from 0, 2 ids    sampled in S/1, 2    prompt of S/3 from 4, 2
    targets       2 3 4 5 6 7         prompt of S/1 from 1, 1 id     sampled in S/1, 2    prompt of S/3 from 4, 2
                                      sampled in S/3, 1
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from unbroken.errors import InvalidInputError, missing_extra
from unbroken.ledger.records import StoredSession
from unbroken.ledger.tree import StoredTree
from unbroken.types import NO_VERSION, SampledSequence, TokenIds, TrainingSample


@dataclass(frozen=True, slots=True)
class _Run:
    """Ids of a row that lie in one node."""

    node: int
    is_sampled: bool
    start: int
    stop: int


def name_sequence(session_id: str, node: int) -> str:
    """The name, in spans, of what a sampled node of a session's tree has."""
    return f"{session_id}/{node}"


def split_sequence_name(sequence_id: str) -> tuple[str, int] | None:
    """The session and the node of `name_sequence`; None for any other name."""
    session_id, slash, node = sequence_id.rpartition("/")
    return (session_id, int(node)) if slash and session_id and node.isascii() and node.isdecimal() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvableTurn:
    """What a sampled node of a session has, and how it was sampled."""

    prompt_ids: TokenIds
    sampled: SampledSequence
    policy: str
    """Which policy answered, whose versions `sampled` has."""
    sampling: Mapping[str, Any]
    """`SamplingParams.changes`."""


def read_turns(stored: StoredSession) -> dict[int, ProvableTurn]:
    """The turn of each sampled node of a session."""
    grown = StoredTree.grow(stored)
    turns = ((node, stored.turns[number]) for node, number in grown.turn_of_node.items())
    return {
        node: ProvableTurn(
            prompt_ids=grown.tree.token_ids(turn.parent),
            sampled=turn.sequence,
            policy=turn.policy,
            sampling=turn.sampling,
        )
        for node, turn in turns
    }


@overload
def make_data(source: str, samples: Sequence[TrainingSample], more: Mapping[str, Any]) -> list[Any]: ...
@overload
def make_data(source: Any, samples: Sequence[Any], more: Sequence[float]) -> list[Any]: ...
def make_data(source: Any, samples: Sequence[Any], more: Any) -> list[Any]:
    """One `tinker.Datum` for each sample, with `target_tokens`, `logprobs` and `advantages`. What is not trained has
    the advantage 0, and what was not sampled the logprob 0.

    Args:
        source: the id of a gateway's session; or the prompt of sequences, a `tinker.ModelInput` of text or ids [T].
        samples: the session's rows; or the `tinker.SampledSequence`s that the SDK sampled after the prompt.
        more: of a session the answer of `client.sessions.tree`; or an advantage for each sequence.

    Raises:
        InvalidInputError: the SDK is not installed, a row has images or is not of this session, a sequence has no name
            or no logprobs, or a row's logprobs are those of no loss of the API: at another temperature than 1, over ids
            that top-k or top-p kept, with penalties or a format. The server checks that of sequences.
    """
    try:
        sdk: Any = importlib.import_module("tinker")
    except ImportError as error:
        raise missing_extra(error, "data of the Tinker SDK need it", "tinker") from error
    if isinstance(source, str):
        return [_make_datum(sdk, source, row, more, number=number) for number, row in enumerate(samples)]
    if len(more) != len(samples):
        raise InvalidInputError(f"there must be one advantage for each sequence, got {len(more)} for {len(samples)}")
    prompt = [int(each) for each in (source.to_ints() if isinstance(source, sdk.ModelInput) else source)]
    if not prompt:
        raise InvalidInputError("the prompt must have at least one id, got none")
    pairs = enumerate(zip(samples, more, strict=True))
    return [_make_sampled(sdk, prompt, each, float(advantage), number=n) for n, (each, advantage) in pairs]


def _make_sampled(sdk: Any, prompt: list[int], sequence: Any, advantage: float, *, number: int) -> Any:
    """The datum of a sequence that the SDK sampled after a prompt."""
    ids, logprobs, name = list(sequence.tokens), sequence.logprobs, sequence.sequence_id
    if name is None or logprobs is None or not ids:
        rule = "must have a sequence_id, ids and their logprobs, by which the server knows it (SDK >= 0.38)"
        raise InvalidInputError(f"sequences[{number}] {rule}, got {name!r}, {len(ids)} ids, {type(logprobs).__name__}")
    given, sampled = len(prompt) - 1, len(ids)
    full = [*prompt, *ids]
    datum = sdk.Datum(
        model_input=sdk.ModelInput.from_ints(full[:-1]),
        loss_fn_inputs={
            "target_tokens": sdk.TensorData.from_numpy(np.array(full[1:], np.int64)),
            "logprobs": sdk.TensorData.from_numpy(np.array([0.0] * given + list(logprobs), np.float32)),
            "advantages": sdk.TensorData.from_numpy(np.array([0.0] * given + [advantage] * sampled, np.float32)),
        },
    )
    of_prompt, of_sampled = sdk.PromptProvenanceSpan, sdk.SampledProvenanceSpan
    spans = (
        (of_prompt(sequence_id=name, length=given + 1), of_sampled(sequence_id=name, length=sampled - 1)),
        (of_prompt(sequence_id=name, offset=1, length=given), of_sampled(sequence_id=name, length=sampled)),
    )
    of_input, of_targets = ([span for span in field if span.length] for field in spans)
    return datum.with_provenance(model_input=of_input, loss_fn_inputs=of_targets)


def _make_datum(sdk: Any, session_id: str, row: TrainingSample, tree: Mapping[str, Any], *, number: int) -> Any:
    nodes: Sequence[Mapping[str, Any]] = tree["nodes"]
    if row.temperature != 1:
        raise InvalidInputError(
            f"rows[{number}] must be sampled at temperature 1, as the API's losses compute logprobs, got "
            f"{row.temperature}"
        )
    if row.kept_ids is not None:
        raise InvalidInputError(f"rows[{number}] must be sampled without top_k, top_p and min_p, and it has kept_ids")
    if row.images:
        raise InvalidInputError(
            f"rows[{number}] must have no images, which the server samples with but does not train on"
        )
    runs = _find_runs(row, nodes)
    if runs is None:
        raise InvalidInputError(f"rows[{number}] is not a row of session {session_id!r}: its tree has no such path")
    for run in runs:
        if run.is_sampled and not row.sampled_mask[run.start : run.stop].all():
            raise InvalidInputError(
                f"rows[{number}] must have turns that were sampled whole, and the reasoning of node {run.node} of "
                f"session {session_id!r} was closed by given ids: the API knows no such sequence"
            )
    _check_sampling(row, runs, tree.get("turns", ()), number=number)
    arrays = {
        "target_tokens": row.token_ids[1:].astype(np.int64),
        "logprobs": np.where(row.sampled_mask, row.rollout_logprobs, np.float32(0))[1:],
        "advantages": row.advantages[1:],
    }
    inputs = {name: sdk.TensorData.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    datum = sdk.Datum(model_input=sdk.ModelInput.from_ints(row.token_ids[:-1].tolist()), loss_fn_inputs=inputs)
    end = len(row.token_ids)
    return datum.with_provenance(
        model_input=list(_make_spans(sdk, session_id, runs, range(end - 1))),
        loss_fn_inputs=list(_make_spans(sdk, session_id, runs, range(1, end))),
    )


def _check_sampling(
    row: TrainingSample, runs: Sequence[_Run], turns: Sequence[Mapping[str, Any]], *, number: int
) -> None:
    """Raise `InvalidInputError` for trained ids of a turn whose distribution was not the model's own."""
    by_node = {turn["end"]["node"]: turn for turn in turns}
    for run in runs:
        turn = by_node.get(run.node)
        if turn is not None and turn.get("sampling") and row.loss_mask[run.start : run.stop].any():
            raise InvalidInputError(
                f"rows[{number}] must be sampled as the API's losses compute logprobs, at temperature 1 of the whole "
                f"vocabulary, and turn {turn['number']} was sampled with {dict(turn['sampling'])}"
            )


def _make_spans(sdk: Any, session_id: str, runs: Sequence[_Run], covered: range) -> Iterator[Any]:
    """Spans of the ids of a row in a range. Given ids are positions of the prompt of the next sampled node."""
    for number, run in enumerate(runs):
        start, stop = max(run.start, covered.start), min(run.stop, covered.stop)
        if start >= stop:
            continue
        of = next(later for later in runs[number:] if later.is_sampled)
        kind = sdk.SampledProvenanceSpan if run.is_sampled else sdk.PromptProvenanceSpan
        offset = start - run.start if run.is_sampled else start
        yield kind(sequence_id=name_sequence(session_id, of.node), offset=offset, length=stop - start)


def _find_runs(row: TrainingSample, nodes: Sequence[Mapping[str, Any]]) -> list[_Run] | None:
    """The nodes that a row is a path of, by its ids and logprobs; None if there are none. It ends with a sampled id."""
    for path in _list_paths(nodes):
        runs, start = [], 0
        for number, length in path:
            stop = min(start + length, len(row.token_ids))
            runs.append(_Run(number, nodes[number]["origin"] == "sampled", start, stop))
            start = stop
        if start == len(row.token_ids) and all(_has_run(row, run, nodes[run.node]) for run in runs):
            return [run for run in runs if run.start < run.stop]
    return None


def _has_run(row: TrainingSample, run: _Run, node: Mapping[str, Any]) -> bool:
    part, length = slice(run.start, run.stop), run.stop - run.start
    ids, logprobs = node["token_ids"][:length], node["rollout_logprobs"][:length]
    is_sampled = np.asarray(node["policy_versions"][:length]) != NO_VERSION
    is_same = np.array_equal(row.token_ids[part], ids) and np.array_equal(row.sampled_mask[part], is_sampled)
    return is_same and np.array_equal(row.rollout_logprobs[part][is_sampled], np.asarray(logprobs)[is_sampled])


def _list_paths(nodes: Sequence[Mapping[str, Any]]) -> Iterable[list[tuple[int, int]]]:
    """Of each node, itself and those before it on its path, each with how many of its ids are on the path."""
    for last, node in enumerate(nodes):
        path, step = [], (last, len(node["token_ids"]))
        while True:
            path.append(step)
            parent = nodes[step[0]]["parent"]
            if parent is None:
                break
            step = parent["node"], parent["offset"]
        yield path[::-1]
