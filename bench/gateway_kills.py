"""Kill -9 the gateway again and again while a run trains through it, and check that nothing is lost.

    python bench/gateway_kills.py --model runs/lookup/model --num-kills 20 --num-steps 15

Three processes: `unbroken serve`, which samples; `unbroken gateway` in front of it, which is killed and started again;
and `unbroken train recipes/lookup_agent.py`, whose agents ask the gateway through the OpenAI SDK. At the end every step
must have all of its attempts, none failed, every row must be exact, and the gateway's store must hold exactly the ids
that the run counted. `--model` is a warmed-up model of the demo, such as the `model` folder of a run of
recipes/lookup.py.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from kills import Process, free_port
from unbroken.ledger.records import SessionStatus
from unbroken.ledger.store import open_store

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "lookup_agent.py"
EXACT_K3 = 1e-10
KEY_FILE = "control.key"


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill a gateway while a run trains through it.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--num-kills", type=int, default=20)
    parser.add_argument("--num-steps", type=int, default=15)
    parser.add_argument("--between-s", type=float, default=14.0, help="mean seconds between two kills")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server_url, gateway_url = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        (folder / KEY_FILE).write_text(secrets.token_urlsafe(24))
        server = Process(serve_command(args.model, folder, server_url), folder / "server.log")
        command = gateway_command(args.model, folder, server_url, gateway_url)
        gateway = Process(command, folder / "gateway.log")
        wait_until_up(server_url)
        wait_until_up(gateway_url)
        trainer = Process(train_command(args, folder, server_url, gateway_url), folder / "trainer.log")
        began, num_kills = time.monotonic(), 0
        try:
            while (code := trainer.wait(rng.uniform(0.2, 2 * args.between_s))) is None:
                if num_kills < args.num_kills and has_begun(folder):
                    gateway.kill()
                    num_kills += 1
                    gateway = Process(command, folder / "gateway.log")
                    print(
                        f"kill {num_kills} after {time.monotonic() - began:.0f} s, {len(read_steps(folder))} steps",
                        flush=True,
                    )
        finally:
            for process in (trainer, gateway, server):
                process.kill()
        if code != 0:
            sys.exit(f"the run ended with {code}:\n{(folder / 'trainer.log').read_text()[-3000:]}")
        print(f"{num_kills} kills, {time.monotonic() - began:.0f} s")
        check(folder, args.num_steps)


def serve_command(model: Path, folder: Path, url: str) -> list[str]:
    port = url.rpartition(":")[2]
    return [
        sys.executable, "-m", "unbroken", "serve", "--model", str(model), "--engine", "transformers", "--port", port,
        "--weights-dir", str(folder / "weights"), "--exit-with-parent", "--dtype", "float32", "--max-batch", "128",
    ]  # fmt: skip


def gateway_command(model: Path, folder: Path, upstream: str, url: str) -> list[str]:
    port = url.rpartition(":")[2]
    return [
        sys.executable, "-m", "unbroken", "gateway", "--upstream", upstream, "--tokenizer", str(model),
        "--store", str(folder / "sessions"), "--port", port, "--exit-with-parent",
        "--api-key-file", str(folder / KEY_FILE),
    ]  # fmt: skip


def train_command(args: argparse.Namespace, folder: Path, server: str, gateway: str) -> list[str]:
    return [
        sys.executable, "-m", "unbroken", "train", str(RECIPE), f"--model={args.model}", f"--output={folder / 'run'}",
        "--engine.kind=server", f"--engine.urls={server}", f"--engine.weights-dir={folder / 'weights'}",
        f"--sessions.url={gateway}", f"--sessions.api-key-file={folder / KEY_FILE}",
        f"--loop.num-steps={args.num_steps}", "--evaluation.num-problems=0",
    ]  # fmt: skip


def wait_until_up(url: str) -> None:
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        try:
            if httpx.get(f"{url}/health", timeout=2.0).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    sys.exit(f"{url} did not answer within 120 s")


def has_begun(folder: Path) -> bool:
    """Whether the run has a folder: before, there is nothing to lose."""
    return (folder / "run").exists()


def read_steps(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "metrics" / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def check(folder: Path, num_steps: int) -> None:
    """Compare what the run counted with what the store holds; exits with what does not hold."""
    steps = read_steps(folder)
    counted = sum(step["rollout/num_sampled_tokens"] for step in steps)
    k3 = max(step["mismatch/k3"] for step in steps if step.get("mismatch/k3") is not None)
    store = open_store(str(folder / "sessions"))
    records = store.list_sessions()
    finished = [record for record in records if record.status is SessionStatus.FINISHED]
    loaded = [store.load(record.session_id) for record in finished]
    stored = sum(len(turn.sequence.completion_ids) for one in loaded if one is not None for turn in one.turns)
    forks = [turn.fork for one in loaded if one is not None for turn in one.turns if turn.fork is not None]
    failed = sum(step.get("counters/status/failed") or 0 for step in steps)
    store.close()
    print(
        f"{len(steps)} steps, {len(finished)} sessions finished, "
        f"{len(records) - len(finished)} created twice and unused"
    )
    print(f"ids counted by the run {counted}, in the store {stored}; largest mismatch/k3 {k3:.1e}; forks {len(forks)}")
    problems = [
        rule
        for rule, holds in {
            "every step once, in order": [step["step"] for step in steps] == list(range(num_steps)),
            "128 attempts in each": all(step["rollout/num_trajectories"] == 128 for step in steps),
            "no attempt failed": failed == 0,
            "the store has every id that was trained, and no other": counted == stored,
            "every row is exact": k3 <= EXACT_K3,
            "no fork": not forks,
        }.items()
        if not holds
    ]
    if problems:
        sys.exit(f"does not hold: {'; '.join(problems)}")
    print("nothing lost, nothing doubled")


if __name__ == "__main__":
    main()
