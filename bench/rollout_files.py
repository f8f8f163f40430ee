"""Size of a group's records, and the CPU time to make and write them: 8 rollouts, ids by a power law."""

from __future__ import annotations

import gzip
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from unbroken.counters import Counters
from unbroken.ledger.export import export_samples, find_trained_paths
from unbroken.ledger.nodes import Origin
from unbroken.ledger.tree import TokenTree
from unbroken.rollout.trajectory import Trajectory, TrajectoryStatus
from unbroken.runs.records.files import write_records
from unbroken.runs.records.record import RecordedRow, make_record
from unbroken.types import FinishReason, SampledSequence, VersionSpan, token_ids

VOCAB_SIZE = 150_000


def make_trajectory(rng: np.random.Generator, num_sampled: int) -> Trajectory:
    sequence = SampledSequence(
        completion_ids=token_ids(rng.zipf(1.3, num_sampled) % VOCAB_SIZE),
        rollout_logprobs=-rng.exponential(0.3, num_sampled).astype(np.float32),
        finish_reason=FinishReason.LENGTH,
        version_spans=(VersionSpan(start=0, stop=num_sampled, policy_version=3),),
    )
    tree = TokenTree()
    tree.add_sampled(sequence, parent=tree.add_given(rng.integers(0, VOCAB_SIZE, 200), Origin.PROMPT, parent=None))
    return Trajectory(
        trajectory_id="t",
        tree=tree,
        turns=(),
        messages=(),
        tools=(),
        status=TrajectoryStatus.COMPLETED,
        reward=1.0,
        counters=Counters(),
        error=None,
        wall_time_s=1.0,
    )


def make_rows(member: Trajectory) -> list[RecordedRow]:
    rows = export_samples(member.tree, 1.0)
    paths = find_trained_paths(member.tree)
    near = [row.rollout_logprobs + np.float32(1e-6) for row in rows]
    return [
        RecordedRow(path=path, row=replace(row), trained=row, trainer_logprobs=scored)
        for path, row, scored in zip(paths, rows, near, strict=True)
    ]


def main() -> None:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for num_sampled in (1_000, 8_000):
            members = [make_trajectory(rng, num_sampled) for _ in range(8)]
            started = time.process_time()
            lines = [{"format": 1}, *(make_record("g", member, make_rows(member)) for member in members)]
            path = write_records(Path(folder), num_sampled, 0, lines, images={})
            seconds = time.process_time() - started
            text = len(gzip.decompress(path.read_bytes()))
            print(
                f"8 rollouts of {num_sampled:5} sampled ids: {text / 1e3:6.0f} kB of JSON, "
                f"{path.stat().st_size / 1e3:5.0f} kB of gzip, {seconds:.2f} CPU s"
            )


if __name__ == "__main__":
    main()
