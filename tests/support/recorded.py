"""Folders of runs as `unbroken train` leaves them, made without training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unbroken.runs.records.files import make_first_lines, summarize, write_records

HOSTILE = "<script>hacked()</script></script><img src=x onerror=hacked()> \u202eright to left \x00 \ud800 end"
"""What must be shown as text."""


def make_row(token_ids: Sequence[int], *, num_prompt: int, advantage: float = 0.5, node: int = 0) -> dict[str, Any]:
    """A row of a prompt and what was sampled after it, in nodes `node` and `node + 1`."""
    length = len(token_ids)
    num_sampled = length - num_prompt
    return {
        "token_ids": list(token_ids),
        "segments": [
            {"start": 0, "stop": num_prompt, "origin": "prompt", "node": node},
            {"start": num_prompt, "stop": length, "origin": "sampled", "node": node + 1},
        ],
        "message_indices": [[0, num_prompt, 0]],
        "rollout_logprobs": [-0.25 * (n % 8) for n in range(num_sampled)],
        "trainer_logprobs": [-0.25 * (n % 8) - 0.125 for n in range(num_sampled)],
        "policy_versions": [[num_prompt, length, 3]],
        "temperature": 1.0,
        "is_trained": True,
        "loss": [[num_prompt, length]],
        "advantages": [[num_prompt, length, advantage]],
        "images": [],
    }


def make_turn(num_sampled: int, message: dict[str, Any], **others: Any) -> dict[str, Any]:
    """A turn that ended by itself."""
    usual = {"reward": None, "finish_reason": "stop", "cut_by": None, "bridge": False, "refusal": None, "fork": None}
    return {**usual, "num_sampled": num_sampled, "message": message, "call_statuses": [], **others}


def make_trajectory(name: str, rows: Sequence[dict[str, Any]], **others: Any) -> dict[str, Any]:
    """A rollout of one turn, as far as `others` say nothing else."""
    message = {"role": "assistant", "content": "The answer is 4."}
    usual = {
        "kind": "trajectory",
        "group": name.partition("/")[0],
        "trajectory": name,
        "status": "completed",
        "error": None,
        "reward": 1.0,
        "reward_parts": {"exact": 1.0},
        "wall_time_s": 0.5,
        "counters": {},
        "tools": [],
        "messages": [{"role": "user", "content": "What is 2 + 2?"}, message],
        "turns": [make_turn(sum(len(row["rollout_logprobs"]) for row in rows), message)],
        "rows": list(rows),
    }
    return {**usual, **others}


def write_step(
    run: Path,
    step: int,
    trajectories: Sequence[dict[str, Any]],
    *,
    rank: int = 0,
    folder: str = "rollouts",
    **head: Any,
) -> Path:
    """Write the records of a step; with more in its first line it is one of today, with columns and texts."""
    summaries = [summarize(each) for each in trajectories] if head and "columns" not in head else []
    head = {
        "kind": "step",
        "format": 1,
        "step": step,
        "rank": rank,
        "num_processes": rank + 1,
        "policy_version": step,
        "model": "no-such-model",
        "num_groups": 1,
        "num_kept": 1,
        "counters": {},
        **head,
    }
    first = make_first_lines(head, summaries) if summaries else [head]
    return write_records(run / folder, step, rank, [*first, *trajectories], images={})


def write_metrics(folder: Path, num_steps: int, *, end: str = "") -> None:
    """Write the numbers of steps; `end` is the beginning of a line that is not finished."""
    lines = [{"step": step, "reward/mean": 0.1 * step, "mismatch/kl": None} for step in range(num_steps)]
    (folder / "metrics").mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics" / "metrics.jsonl").write_text(text + end)


def make_forked() -> dict[str, Any]:
    """A rollout whose second turn left the history: 1 2 | 3 4 and 1 9 | 6."""
    first, second = {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}
    return make_trajectory(
        "g0/1",
        [make_row([1, 2, 3, 4], num_prompt=2), make_row([1, 9, 6], num_prompt=2, node=2)],
        reward=0.0,
        messages=[{"role": "user", "content": HOSTILE}, second],
        turns=[make_turn(2, first), make_turn(1, second, fork="rewritten_history", finish_reason="length")],
    )


def make_rich() -> dict[str, Any]:
    """A rollout with all that a record can have, and hostile names: a cut turn, a picture, a call, a clipped id.

    prompt 1 [image] | sampled 2 3, cut | closing 4, template 5, tool text 6 | sampled 7 8
    """
    text = {"role": "assistant", "content": "b"}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": HOSTILE, "arguments": "{}"}}]}
    first = {"start_s": 0.0, "sampling_s": 0.5, "sampled_s": 1.0, "answered_s": 2.0}
    times = {**first, "calls": [{"name": HOSTILE, "status": HOSTILE, "start_s": 1.0, "stop_s": 1.5}] * 2}
    last = {"start_s": 2.0, "sampling_s": 2.0, "sampled_s": 3.0, "answered_s": None, "calls": []}
    segments = [(0, 2, "prompt"), (2, 4, "sampled"), (4, 7, "bridge"), (7, 9, "sampled")]
    row = {
        **make_row([1, 9, 2, 3, 4, 5, 6, 7, 8], num_prompt=5),
        "segments": [
            {"start": start, "stop": stop, "origin": origin, "node": node}
            for node, (start, stop, origin) in enumerate(segments)
        ],
        "message_indices": [[0, 1, 0], [1, 2, 0], [6, 7, 2]],
        "entropies": [0.5, 0.25, 1.5, 0.0],
        "ranks": [1, 3, 200, 1],
        "policy_versions": [[2, 4, 3], [7, 9, 4]],
        "loss": [[2, 4], [7, 9]],
        "advantages": [[2, 4, 0.5], [7, 9, 0.5]],
        "clipped": [[3, 4]],
        "corrected": [[8, 9]],
        "images": [{"start": 1, "stop": 2, "sha256": "0" * 64}],
    }
    return make_trajectory(
        "g1/0",
        [row],
        wall_time_s=3.5,
        messages=[
            {"role": "user", "content": [{"type": "image", "sha256": "0" * 64}, {"type": "image"}]},
            call,
            {"role": "tool", "content": HOSTILE},
            text,
        ],
        turns=[
            make_turn(2, call, finish_reason="length", times=times, closing=None, fork=HOSTILE),
            make_turn(2, text, bridge=True, times=last, closing={"how": HOSTILE, "num_ids": 1}),
        ],
    )


def write_run(folder: Path) -> Path:
    """A run of two steps, with a rollout that forked and one that failed with hostile text."""
    write_metrics(folder, 2)
    plain = make_trajectory("g0/0", [make_row([1, 2, 3, 4, 5], num_prompt=2)])
    failed = make_trajectory("g0/2", [], status="failed", error=HOSTILE, reward=None, turns=[])
    write_step(folder, 0, [plain])
    write_step(folder, 1, [plain, make_forked(), failed])
    (folder / "evaluation.jsonl").write_text(json.dumps({"step": 0, "set": "evaluation", "reward/mean": 0.5}) + "\n")
    return folder
