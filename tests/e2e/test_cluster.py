"""The table of failures in docs/cluster.md: `unbroken cluster run` on three nodes of Ray inside this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from safetensors.torch import load_file

from support.clusters import RECIPE, ClusterRun, Nodes
from support.gateways import CHAT
from support.postgres import PostgresServer, run_postgres
from support.processes import free_port
from support.served import save_tiny_model
from unbroken.timeline import read_timeline

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (make e2e)"),
]

NUM_STEPS, HELD_STEP = 8, 6
"""Each run waits before a step until what its test does to it is done, however fast this machine is."""
PARTS = ("--trainers", "2x1", "--engines", "2")
OWN = (
    f"--loop.num-steps={NUM_STEPS}", "--seed=1", "--checkpoints.every=1", "--rollouts.group-size=4",
    "--rollouts.sampling.max-tokens=16", "--trainer.optimizer.learning-rate=1e-2", "--trainer.optimizer.eps=1e-2",
)  # fmt: skip


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes(1, 1, 3)
    yield nodes
    nodes.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@contextmanager
def started(
    nodes: Nodes, output: Path, model: Path, *own: str, parts: tuple[str, ...] = PARTS, recipe: Path = RECIPE
) -> Iterator[ClusterRun]:
    given = {word.partition("=")[0] for word in own}
    options = [word for word in OWN if word.partition("=")[0] not in given]
    run = ClusterRun(nodes, output, model, parts, [*options, *own], recipe)
    try:
        yield run
    finally:
        run.close()


@pytest.fixture(scope="module")
def undisturbed(nodes: Nodes, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The final model of a run in which nothing fails."""
    with started(nodes, tmp_path_factory.mktemp("undisturbed") / "run", model) as run:
        run.finish()
    check(run)
    return run.output / "final" / "model.safetensors"


def check(run: ClusterRun, undisturbed: Path | None = None) -> None:
    """The invariants of a run that has ended well."""
    steps = run.steps()
    assert [step["step"] for step in steps] == list(range(NUM_STEPS))
    versions = [step["train/policy_version"] for step in steps]
    assert versions == sorted(set(versions))  # trainers that start again publish theirs under a new number
    assert sorted(run.problems()) == list(range(2 * NUM_STEPS))
    assert all(step["staleness/max"] == 0 and step["mismatch/k3_lag_0"] < 1e-8 for step in steps)
    # A part may tell later, such as of a sampler that ended with the trainer.
    assert [event["what"] for event in run.events() if event["part"] == "trainers"][-1] == "end"
    run.check_nothing_is_left()
    if undisturbed is not None:
        found, expected = load_file(run.output / "final" / "model.safetensors"), load_file(undisturbed)
        assert max(float((found[name] - expected[name]).abs().max()) for name in expected) <= 1e-5


@pytest.fixture
def disturbed(nodes: Nodes, model: Path, undisturbed: Path, tmp_path: Path) -> Callable[..., ClusterRun]:
    """Runs until something is done to it after some steps, then to its end, and checks it."""

    def run_with(disturb: Callable[[ClusterRun], None], *, parts: tuple[str, ...] = PARTS) -> ClusterRun:
        with started(nodes, tmp_path / "run", model, parts=parts) as run:
            run.hold(HELD_STEP)
            run.wait_for_steps(3)
            disturb(run)
            run.go_on()
            run.finish()
        check(run, undisturbed)
        return run

    return run_with


def test_an_engine_that_is_killed_starts_again_while_the_run_goes_on(disturbed):
    def disturb(run: ClusterRun) -> None:
        run.kill("engine-0")
        run.wait_until(lambda: run.part("engine-0")["version"] == run.steps()[-1]["train/policy_version"])
        assert run.part("engine-0")["state"] == "serves"

    run = disturbed(disturb)
    (reason,) = run.reasons("engine-0")
    assert reason.startswith("was killed by SIGKILL")
    assert run.reasons("trainers") == []


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_all_trainers_start_again_from_the_checkpoint_after_one_is_killed(disturbed, rank):
    run = disturbed(lambda run: run.kill(f"trainers-{rank}"))
    (reason,) = run.reasons("trainers")
    # Whichever is seen first: its own end, or that of the other one, which says whom it lost.
    by_other = f"rank {1 - rank} ended with status 1: rank {rank} of 2 "
    assert f"rank {rank} was killed by SIGKILL (node 127.0.0.1/" in reason or reason.count(by_other) == 1
    assert run.reasons("engine-0") == run.reasons("engine-1") == []


@pytest.mark.nightly
def test_trainers_move_to_another_node_when_theirs_dies(disturbed, nodes):
    def disturb(run: ClusterRun) -> None:
        start_another = nodes.kill(run.part("trainers-0")["node"])
        run.wait_until(lambda: run.reasons("trainers"))
        start_another()

    run = disturbed(disturb)
    (reason,) = run.reasons("trainers")
    assert "was lost with its node" in reason
    assert "died" in [event["what"] for event in run.events()]


@pytest.mark.nightly
def test_engines_of_a_node_that_dies_are_lost_with_it_and_the_timeline_says_when(disturbed, nodes):
    gone: list[str] = []

    def disturb(run: ClusterRun) -> None:
        hosts = {run.part(f"trainers-{k}")["node"] for k in range(2)}
        name = min({run.part(f"engine-{k}")["node"] for k in range(3)} - hosts)
        gone.append(name)
        start_another = nodes.kill(name)
        run.wait_until(lambda: any(event["what"] == "died" for event in run.events()))
        start_another()

    run = disturbed(disturb, parts=("--trainers", "2x1", "--engines", "3"))  # each CPU has a part
    engines = ("engine-0", "engine-1", "engine-2")
    lost = [part for part in engines if any("was lost with its node" in each for each in run.reasons(part))]
    assert lost
    assert run.reasons("trainers") == []
    lanes = read_timeline(run.output / "timeline" / "cluster.json")
    begun, ended = ([event["name"] for event in lanes if event["ph"] == phase] for phase in "be")
    assert sum(name.startswith("node ") for name in begun) == 5  # the head, three, and another
    assert {*lost, f"node {gone[0]}"} <= set(ended)


def test_a_cluster_of_this_machine_alone_listens_on_the_loopback_alone_and_writes_no_token(
    model, tmp_path, monkeypatch
):
    """As `ss -ltnp` shows it: engines, trainers, the store in which these meet, and Ray."""
    monkeypatch.setenv("HOME", str(tmp_path))  # where Ray's token would be
    for name in ("RAY_AUTH_TOKEN", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    local: Any = SimpleNamespace(address="local", environment={})
    with started(local, tmp_path / "run", model, parts=("--trainers", "1x1", "--engines", "1")) as run:
        run.hold(HELD_STEP)
        run.wait_for_steps(1)
        parts = psutil.Process(run.process.pid).children(recursive=True)
        own = [each for part in parts for each in part.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        run.go_on()
        run.finish()
    assert len(own) >= 5
    assert {each.laddr.ip for each in own} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    assert not (tmp_path / ".ray" / "auth_token").exists()


def test_nothing_is_left_after_a_signal_and_the_same_command_continues(nodes, model, undisturbed, tmp_path):
    ends = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}
    for num_steps, number in zip((2, 4, 6), ends, strict=True):
        with started(nodes, tmp_path / "run", model) as run:
            run.hold(HELD_STEP)
            run.wait_for_steps(num_steps)
            run.process.send_signal(number)
            assert run.wait_until_ended() == ends[number]
    with started(nodes, tmp_path / "run", model) as run:
        run.go_on()
        run.finish()
    check(run, undisturbed)


@pytest.mark.nightly
def test_samplers_that_are_killed_are_replaced_and_nothing_is_lost_or_doubled(disturbed):
    def disturb(run: ClusterRun) -> None:
        for number in (4, 5, 6):
            run.kill(f"sampler-{number % 2}")
            run.wait_for_steps(number)
        run.wait_until(lambda: all(run.part(f"sampler-{k}")["state"] == "serves" for k in range(2)))

    parts = ("--trainers", "2x1", "--engines", "1", "--samplers", "2", "--sampler.port", str(free_port()))
    run = disturbed(disturb, parts=parts)
    assert len(run.reasons("sampler-0")) + len(run.reasons("sampler-1")) >= 3
    assert run.reasons("trainers") == run.reasons("engine-0") == []


class Agent:
    """An agent of the gateways, with the key of the run."""

    def __init__(self, run: ClusterRun) -> None:
        self._run = run
        self._control = {"Authorization": f"Bearer {(run.output / 'cluster' / 'key').read_text().strip()}"}
        self._key = {"Authorization": f"Bearer {self._post(0, '/v1/sessions', {}, self._control).json()['api_key']}"}
        self._messages: list[dict] = []

    def turn(self, gateway: int) -> httpx.Response:
        """Ask a gateway for the next turn."""
        messages = [*self._messages, {"role": "user", "content": f"turn {len(self._messages)}"}]
        found = self._post(gateway, CHAT, {"messages": messages, "max_tokens": 4}, self._key)
        if found.status_code == 200:
            self._messages = [*messages, found.json()["choices"][0]["message"]]
        return found

    def _post(self, gateway: int, path: str, body: dict, headers: dict) -> httpx.Response:
        url = self._run.part(f"gateway-{gateway}")["url"]
        return httpx.post(url + path, json=body, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with run_postgres() as server:
        yield server


@contextmanager
def started_with_gateways(nodes: Nodes, output: Path, model: Path, postgres: PostgresServer) -> Iterator[ClusterRun]:
    parts = ("--trainers", "1x1", "--engines", "1", "--gateways", "2", f"--gateway.store={postgres.url}")
    endless = ("--loop.num-steps=1000", "--trainer.optimizer.learning-rate=1e-6")
    with started(nodes, output, model, *endless, parts=parts) as run:
        run.wait_for_steps(1)
        run.wait_until(lambda: all(run.part(f"gateway-{k}")["url"] for k in range(2)))
        yield run
        run.process.send_signal(signal.SIGTERM)
        assert run.wait_until_ended() == 143


def test_a_gateway_that_is_killed_comes_back_at_its_url_and_the_session_goes_on(nodes, model, postgres, tmp_path):
    with started_with_gateways(nodes, tmp_path / "run", model, postgres) as run:
        agent = Agent(run)
        assert [agent.turn(k).status_code for k in (0, 1, 0)] == [200, 200, 200]
        before = run.part("gateway-0")
        os.kill(before["pid"], signal.SIGKILL)
        assert agent.turn(1).status_code == 200
        run.wait_until(lambda: run.part("gateway-0")["url"] and run.part("gateway-0")["pid"] != before["pid"])
        assert run.part("gateway-0")["url"] == before["url"]
        assert [agent.turn(k).status_code for k in (0, 1)] == [200, 200]
        run.wait_for_steps(3, more=True)
        assert run.reasons("gateway-0")[0].startswith("was killed by SIGKILL")
        assert run.reasons("trainers") == run.reasons("engine-0") == []


@pytest.mark.nightly
def test_gateways_answer_again_when_postgresql_does(nodes, model, postgres, tmp_path):
    with started_with_gateways(nodes, tmp_path / "run", model, postgres) as run:
        agent = Agent(run)
        assert agent.turn(0).status_code == 200
        postgres.stop()
        assert agent.turn(0).status_code == 503
        run.wait_for_steps(3, more=True)
        postgres.start()
        run.wait_until(lambda: agent.turn(0).status_code == 200)
        assert agent.turn(1).status_code == 200
        assert run.reasons("trainers") == run.reasons("engine-0") == []


FULL = """
import errno
from pathlib import Path
from support import letters_recipe
from unbroken.weights import store

Config = letters_recipe.Config
write_weights = store.write_weights

def write_unless_full(parent, *arguments, **options):
    if Path(f"{parent.parent}.full").exists():
        raise WeightsError(f"{parent} cannot be written: {OSError(errno.ENOSPC, 'No space left on device')}")
    return write_weights(parent, *arguments, **options)

async def make_task(config):
    store.write_weights = write_unless_full
    return await letters_recipe.make_task(config)
""".replace("import errno", "import errno\nfrom unbroken.errors import WeightsError")


@pytest.mark.nightly
def test_a_run_whose_versions_cannot_be_written_ends_with_the_reason_and_continues_later(
    nodes, model, undisturbed, tmp_path
):
    recipe, full = tmp_path / "recipe.py", tmp_path / "run.full"
    recipe.write_text(FULL)
    with started(nodes, tmp_path / "run", model, recipe=recipe) as run:
        run.hold(HELD_STEP)
        run.wait_for_steps(3)
        full.touch()
        run.go_on()
        assert run.wait_until_ended() == 1
    assert "No space left on device" in run.text()
    assert all("No space left on device" in reason for reason in run.reasons("trainers"))
    full.unlink()
    with started(nodes, tmp_path / "run", model, recipe=recipe) as run:
        run.finish()
    check(run, undisturbed)


def test_all_ends_with_the_head_and_the_same_command_continues(nodes, model, undisturbed, tmp_path):
    with started(nodes, tmp_path / "run", model) as run:
        run.hold(HELD_STEP)
        run.wait_for_steps(3)
        nodes.kill_head()
        assert run.wait_until_ended() != 0
    nodes.start_again()
    with started(nodes, tmp_path / "run", model) as run:
        run.go_on()
        run.finish()
    check(run, undisturbed)
