"""The demo's task on three nodes of Ray inside this machine, while one is killed and another comes.

    python bench/cluster.py --output runs/cluster            # then: unbroken view runs/cluster

A node dies after step 10, and one of its size joins after step 20. Prints the seconds from the
command to the first step, the memory of Ray beside the parts, the success before and after, and what happened when.
`--undisturbed` lets all nodes live.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from unbroken.demo.config import LookupConfig
from unbroken.demo.model import write_warm_model

REPOSITORY = Path(__file__).resolve().parent.parent
NUM_CPUS = 3
RAY = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
PARTS = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill a node of a cluster while a run learns on it.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-steps", type=int, default=50)
    parser.add_argument("--undisturbed", action="store_true")
    args = parser.parse_args()
    model = args.output.with_name(f"{args.output.name}-model")
    if not model.exists():
        write_warm_model(model, LookupConfig().warm_up, seed=0)
    os.environ.update(RAY, RAY_AUTH_TOKEN=secrets.token_hex(16))
    from ray.cluster_utils import Cluster  # reads the variables when it is imported

    began_s = time.monotonic()
    options = {"node_ip_address": "127.0.0.1", "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **options})
    nodes = [cluster.add_node(num_cpus=NUM_CPUS, **options) for _ in range(3)]
    print(f"head and three nodes up after {time.monotonic() - began_s:.1f} s", flush=True)
    try:
        run(args, model, cluster, nodes, options)
    finally:
        cluster.shutdown()


def run(args: argparse.Namespace, model: Path, cluster: Any, nodes: list[Any], options: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "unbroken", "cluster", "run", str(REPOSITORY / "recipes" / "lookup.py")]
    command += ["--address", cluster.address, "--cpu", "--trainers", "2x1", "--engines", "2"]
    command += ["--engine.options=--engine transformers", f"--engine.model={model}"]
    command += [word for name, value in PARTS.items() for word in ("--env", f"{name}={value}")]
    command += ["--", f"--output={args.output}", f"--model={model}", f"--loop.num-steps={args.num_steps}"]
    command += ["--checkpoints.every=1"]
    began_s = time.monotonic()
    process = subprocess.Popen(command, env={**os.environ, **PARTS})
    wait_for_step(process, args.output, 1)
    print(f"first step after {time.monotonic() - began_s:.1f} s; Ray has {measure_memory():.2f} GB", flush=True)
    if not args.undisturbed:
        wait_for_step(process, args.output, 10)
        names = {part["node"] for part in read_state(args.output)["parts"]}
        victim = next(node for node in nodes if any(node.node_id.startswith(n.rpartition("/")[2]) for n in names))
        cluster.remove_node(victim, allow_graceful=False)
        wait_for_step(process, args.output, 20)
        cluster.add_node(num_cpus=NUM_CPUS, **options)
    assert process.wait() == 0
    print(f"ended after {time.monotonic() - began_s:.1f} s")
    steps = read_lines(args.output / "metrics" / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(args.num_steps))
    before, after = (line["reward/mean"] for line in read_lines(args.output / "evaluation.jsonl"))
    print(f"success {before:.3f} before, {after:.3f} after {args.num_steps} steps")
    first_s = read_lines(args.output / "cluster" / "log.jsonl")[0]["time_s"]
    for event in read_lines(args.output / "cluster" / "log.jsonl"):
        place = event["part"] or event["node"]
        print(f"{event['time_s'] - first_s:7.1f} s  {place} {event['what']} {event['reason']}")


def wait_for_step(process: subprocess.Popen[bytes], output: Path, number: int) -> None:
    while len(read_lines(output / "metrics" / "metrics.jsonl")) < number:
        assert process.poll() is None, "the run has ended"
        time.sleep(0.1)


def read_lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def read_state(output: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((output / "cluster" / "state.json").read_text())
    return state


def measure_memory() -> float:
    """Memory of Ray's own processes and of the actors, each shared page divided among those that share it; in GB."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if not ("/ray/" in words or words.startswith("ray::")):
                continue
            rollup = (path.parent / "smaps_rollup").read_text()
        except OSError:
            continue
        total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return total / 1e6


if __name__ == "__main__":
    main()
