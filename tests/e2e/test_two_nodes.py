"""Two torchruns on this machine, as on two machines, train a mixture of experts; one rank is lost, all start again."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from support.architectures import tiny_model
from support.forks import ForkedPython, forks_with
from support.processes import free_port
from support.servers import server_tokenizer
from unbroken.training.checkpoints import find_checkpoints

NEWER = Path(sys.prefix, "transformers-newer")
"""What experts need, which `make e2e` installs."""
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not NEWER.exists(), reason="newer transformers are not installed beside ours (make e2e)"),
]
NUM_STEPS = 8
LONGEST_S = 240.0
RECIPE = """
import os
from pathlib import Path
from support import letters_recipe

Config = letters_recipe.Config

async def make_task(config):
    Path(f"{config.output}-rank-{os.environ['RANK']}").write_text(str(os.getpid()))
    return await letters_recipe.make_task(config)
"""
"""Says which process is which rank."""


class Nodes:
    """The agents of two nodes, which start a process each."""

    def __init__(self, output: Path, model: Path, forks: dict[str, str]) -> None:
        self.output = output
        self.logs, self.errors = (
            [output.with_name(f"{output.name}-{kind}-{node}") for node in range(2)] for kind in ("log", "errors")
        )
        recipe = output.with_name("recipe.py")
        recipe.write_text(RECIPE)
        endpoint = f"127.0.0.1:{free_port()}"
        settings = {
            "output": output, "model": model, "checkpoints.every": 1, "loop.num-steps": NUM_STEPS,
            "rollouts.group-size": 4, "rollouts.sampling.max-tokens": 8, "trainer.parallel.fsdp": 2,
            "trainer.parallel.expert": 2, "trainer.optimizer.learning-rate": 1e-2, "trainer.optimizer.eps": 1e-2,
        }  # fmt: skip
        variables = {
            **forks, "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self.agents = [
            ForkedPython(
                "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", "--rdzv_backend", "c10d",
                "--rdzv_endpoint", endpoint, "-m", "unbroken", "train", recipe,
                *(f"--{name}={value}" for name, value in settings.items()), output=log, errors=errors,
                environment=variables,
            )
            for log, errors in zip(self.logs, self.errors, strict=True)
        ]  # fmt: skip

    def num_steps(self) -> int:
        """How many steps are in the run's metrics."""
        path = self.output / "metrics" / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def pid(self, rank: int) -> int:
        return int(self.output.with_name(f"{self.output.name}-rank-{rank}").read_text())

    def finish(self) -> None:
        """Wait until both have ended well."""
        try:
            codes = [agent.wait(LONGEST_S) for agent in self.agents]
        finally:
            self.kill()
        assert codes == [0, 0], "".join(errors.read_text() for errors in self.errors)

    def kill(self) -> None:
        for agent in self.agents:
            agent.send_signal(signal.SIGTERM)


def is_alive(pid: int) -> bool:
    """Whether a process runs: neither gone nor waiting to be asked for its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def kill_rank(nodes: Nodes, lost: int, *, num_steps: int) -> None:
    """Kill -9 a rank once the run has made some steps; all end within seconds, and say which one was lost."""
    held = nodes.output.with_name(f"{nodes.output.name}.held")  # the recipe waits, however fast it is
    held.write_text(str(num_steps + 1))
    deadline_s = time.monotonic() + LONGEST_S
    try:
        while nodes.num_steps() < num_steps:
            assert time.monotonic() < deadline_s
            assert all(agent.poll() is None for agent in nodes.agents), nodes.errors[0].read_text()
            time.sleep(0.02)
        pids = [nodes.pid(rank) for rank in range(2)]
        os.kill(pids[lost], signal.SIGKILL)
        codes = [agent.wait(60) for agent in nodes.agents]
    finally:
        nodes.kill()
        held.unlink()
    assert codes == [1, 1]
    assert not any(map(is_alive, pids))
    error = f"unbroken: rank {lost} of 2 (process {pids[lost]} on "
    assert [error in errors.read_text() for errors in nodes.errors].count(True) == 1  # that of the rank that is left


@pytest.fixture(scope="module")
def forks() -> Iterator[dict[str, str]]:
    with forks_with(NEWER) as variables:
        yield variables


def test_two_nodes_that_lose_a_rank_end_with_its_name_and_continue_from_the_newest_checkpoint(tmp_path, forks):
    model, output = save_model(tmp_path / "model"), tmp_path / "run"
    undisturbed = Nodes(tmp_path / "undisturbed", model, forks)
    undisturbed.finish()
    nodes, starts = Nodes(output, model, forks), []
    for lost, num_steps in ((1, 3), (0, 6)):
        kill_rank(nodes, lost, num_steps=num_steps)
        made = max(find_checkpoints(output / "checkpoints"))
        assert num_steps - 1 <= made < NUM_STEPS
        starts.append(made)
        nodes = Nodes(output, model, forks)
    nodes.finish()
    steps = [int(step) for log in nodes.logs for step in re.findall(r"^step (\d+) ", log.read_text(), re.MULTILINE)]
    assert steps == list(range(starts[-1] - 1, NUM_STEPS))  # the last step of the checkpoint is shown again
    assert nodes.num_steps() == NUM_STEPS
    found, expected = (load_file(each.output / "final" / "model.safetensors") for each in (nodes, undisturbed))
    assert found.keys() == expected.keys()
    assert max(float((found[name] - expected[name]).abs().max()) for name in found) <= 1e-6


def save_model(folder: Path) -> Path:
    """Save a random Qwen3-MoE with the servers' tokenizer."""
    tokenizer = server_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_model("qwen3_moe", vocab_size=len(tokenizer), max_position_embeddings=2048).save_pretrained(folder)
    return folder
