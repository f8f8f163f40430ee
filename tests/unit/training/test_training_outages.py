"""Engines that go away in mid run: nothing is lost or trained twice, and no row of other weights is trained."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.flaky_server import Data, Server
from support.loops import Callbacks
from support.models import tiny_qwen3
from support.rows import group, trajectory
from support.steps import train
from unbroken.errors import EngineError, InvalidInputError, OutageError, ServerUnreachableError, TrainingError
from unbroken.rollout.trajectory import TrajectoryStatus
from unbroken.training.checkpoints import Checkpoints
from unbroken.training.config import LoopConfig, OutageConfig, TrainerConfig
from unbroken.training.metrics.writer import MetricsWriter
from unbroken.training.outages import Outages
from unbroken.training.trainer import Trainer
from unbroken.weights.base import WeightUpdate
from unbroken.weights.sources import WeightStream

NUM_STEPS = 4


async def run(
    data: Data,
    directory,
    *,
    publisher=None,
    checkpoints=True,
    engine=True,
    num_steps=NUM_STEPS,
    after_step=None,
    **config,
) -> Trainer:
    trainer = Trainer(tiny_qwen3(), TrainerConfig())
    outages = OutageConfig(**{"wait_s": 5.0, "ask_every_s": 0.01, **config})
    with MetricsWriter(directory) as metrics:
        await train(
            data,
            trainer=trainer,
            publisher=publisher or data.server,
            metrics=metrics,
            config=LoopConfig(num_steps=num_steps, outages=outages),
            checkpoints=Checkpoints(directory / "checkpoints", every=3) if checkpoints else None,
            engine=data.server if engine else None,
            observer=Callbacks(on_rollouts=data.see, after_step=after_step),
        )
    return trainer


def lines(directory) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def assert_whole(data: Data, directory) -> None:
    assert data.trained_rows == list(range(NUM_STEPS))
    logged = lines(directory)
    assert [line["step"] for line in logged] == list(range(NUM_STEPS))
    assert [line["train/policy_version"] for line in logged] == [1, 2, 3, 4]
    assert all(line["train/num_rows"] == 4 and line["staleness/max"] == 0 for line in logged)
    assert all(line["counters/dropped_rows"] == 0 for line in logged)


@pytest.mark.parametrize("num_refusals", [1, 2, 9])
@pytest.mark.parametrize("row", [0, 2])
async def test_a_step_whose_server_goes_away_is_collected_again_from_the_same_rows(tmp_path, row, num_refusals):
    server = Server()
    data = Data(server, {row: lambda: server.goes_away(num_refusals)})
    await run(data, tmp_path)
    assert_whole(data, tmp_path)
    assert server.loaded == ([1, 2, 3, 4] if row == 0 else [1, 2, 2, 3, 4])
    assert [line["outages/num_losses"] for line in lines(tmp_path)] == [int(step == row) for step in range(NUM_STEPS)]
    assert server.required == server.loaded


async def test_i6_rows_of_a_server_that_was_started_again_are_not_trained(tmp_path):
    """It was back before anybody noticed: half of the group is of its first weights, and all of it has rewards."""
    server = Server()
    data = Data(server, {2: lambda: server.goes_away(0)})
    await run(data, tmp_path)
    assert_whole(data, tmp_path)
    assert server.loaded == [1, 2, 2, 3, 4]


async def test_a_publication_that_takes_longer_than_its_publisher_says_is_no_outage(tmp_path):
    class Publisher:
        async def publish(self, named_parameters, *, policy_version):
            await asyncio.sleep(0.05)  # as an engine that wakes before the publisher begins to count
            return await server.publish(named_parameters, policy_version=policy_version)

    server = Server()
    await run(Data(server), tmp_path, publisher=Publisher())
    assert [line["seconds/outages"] for line in lines(tmp_path)] == [0.0] * NUM_STEPS
    assert all(line["seconds/publish"] > 0.05 for line in lines(tmp_path))


async def test_a_server_that_goes_away_while_weights_are_published_is_waited_for(tmp_path):
    class Publisher:
        async def publish(self, named_parameters, *, policy_version):
            if policy_version == 2 and 2 not in server.loaded and not left:
                left.append(True)
                server.goes_away(3)
            return await server.publish(named_parameters, policy_version=policy_version)

    server, left = Server(), []
    data = Data(server)
    await run(data, tmp_path, publisher=Publisher())
    assert_whole(data, tmp_path)
    assert server.loaded == [1, 2, 3, 4]
    assert lines(tmp_path)[1]["seconds/outages"] > 0.02


@pytest.mark.parametrize("row", [0, 2])
async def test_a_server_that_stays_away_ends_the_run_where_it_can_go_on(tmp_path, row):
    """Checkpoints are taken every third step, so the one after two steps is taken because of the outage."""
    server = Server()
    data = Data(server, {row: lambda: server.goes_away(10**9)})
    with pytest.raises(OutageError, match=rf"wait_s.*the server is away.*stands after {row} steps in .*checkpoints"):
        await run(data, tmp_path, wait_s=0.05)
    again = Data(Server())
    again.trained_rows = data.trained_rows
    await run(again, tmp_path)
    assert_whole(again, tmp_path)
    assert again.server.loaded == ([1, 2, 3, 4] if row == 0 else [2, 3, 4])


async def test_a_server_that_stays_away_while_weights_are_published_ends_the_run_where_it_can_go_on(tmp_path):
    class Nobody:
        async def publish(self, named_parameters, *, policy_version):
            raise ServerUnreachableError("the server is away")

    data = Data(Server())
    with pytest.raises(OutageError, match="stands after 1 steps"):
        await run(data, tmp_path, publisher=Nobody(), wait_s=0.05)
    again = Data(Server())
    again.trained_rows = data.trained_rows
    await run(again, tmp_path)
    assert_whole(again, tmp_path)


async def test_a_run_that_was_not_told_of_its_engine_ends_with_the_first_loss(tmp_path):
    server = Server()
    data = Data(server, {1: lambda: server.goes_away(1)})
    with pytest.raises(
        OutageError, match=r"rollouts were lost: ServerUnreachableError: the server is away.*no `checkpoints`"
    ):
        await run(data, tmp_path, engine=False, checkpoints=False)
    assert len(lines(tmp_path)) == 1


async def test_a_step_that_ends_its_engine_each_time_is_not_tried_for_ever(tmp_path):
    class Deadly(Data):
        async def sample(self, row):
            self._events[2] = lambda: server.goes_away(2)
            return await super().sample(row)

    server = Server()
    with pytest.raises(OutageError, match=r"lost 3 times although the engine came back .* a prompt of this step"):
        await run(Deadly(server), tmp_path, max_losses=3)
    assert len(lines(tmp_path)) == 2


async def test_what_a_healthy_engine_refuses_twice_is_no_outage(tmp_path):
    class Refuses:
        num_calls = 0

        async def publish(self, named_parameters, *, policy_version):
            self.num_calls += 1
            raise EngineError("no admin key")

    publisher = Refuses()
    with pytest.raises(EngineError, match="no admin key"):
        await run(Data(Server()), tmp_path, publisher=publisher)
    assert publisher.num_calls == 2


async def test_timeouts_of_an_engine_that_hangs_are_an_outage_and_those_of_a_healthy_one_are_trained(tmp_path):
    class Slow(Data):
        async def sample(self, row):
            of_row = await super().sample(row)
            late = trajectory(0.0, status=TrajectoryStatus.TIMEOUT, completion=None)
            if row == 1 and self.server.required == [1] and not hung:
                hung.append(True)
                self.server.num_refusals = 2
            return group(*of_row.trajectories[:3], late)

    hung: list[bool] = []
    data = Slow(Server())
    await run(data, tmp_path)
    assert [line["outages/num_losses"] for line in lines(tmp_path)] == [0, 1, 0, 0]
    assert [line["counters/dropped_rows/nothing_sampled"] for line in lines(tmp_path)] == [1] * NUM_STEPS


async def test_a_run_does_not_go_on_to_fewer_steps_than_it_has_made(tmp_path):
    await run(Data(Server()), tmp_path, num_steps=3)
    with pytest.raises(InvalidInputError, match=r"num_steps must be at least 3, the steps that .* has made, got 2"):
        await run(Data(Server()), tmp_path, num_steps=2)
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2]


class ProcessStandIn:
    """What `Outages` asks of a trainer, of two that meet in threads; who waits for nobody is reports after a while."""

    policy_version = 1

    def __init__(self, rank: int, reports: list, barrier: threading.Barrier) -> None:
        self._rank, self._reports, self._barrier = rank, reports, barrier

    def named_weights(self):
        return WeightStream((), ())

    def from_all_processes(self, value):
        self._reports[self._rank] = value
        self._barrier.wait()
        values = list(self._reports)
        self._barrier.wait()
        return values

    def in_any_process(self, flag):
        return any(self.from_all_processes(flag))

    def finish_together(self, weights, error):
        errors = self.from_all_processes(error)
        if error is not None:
            raise error
        if any(errors):
            raise TrainingError(f"another process failed: {[each for each in errors if each]}")


def in_two_processes(*runs) -> list[str]:
    """How the runs of two processes end, each given a trainer."""
    reports, barrier = [None, None], threading.Barrier(2, timeout=60)

    def ended(rank: int) -> str:
        try:
            asyncio.run(runs[rank](ProcessStandIn(rank, reports, barrier)))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "well"

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(ended, range(2)))


def test_a_refusal_that_one_process_hears_is_no_outage_for_the_others():
    """They would take a checkpoint together, and wait in it for the one that has ended."""

    async def run(trainer):
        class Refused:
            async def publish(self, named_parameters, *, policy_version):
                if trainer._rank == 0:
                    raise EngineError("no admin key")
                return WeightUpdate(num_bytes=0, seconds=0.0)

        config = LoopConfig(num_steps=1, outages=OutageConfig(ask_every_s=0.01))
        await Outages(trainer, Refused(), config, engine=Server()).publish()

    first, second = in_two_processes(run, run)
    assert first == "EngineError: no admin key"
    assert second.startswith("TrainingError: another process cannot publish")


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (Server(vocab_size=99), "the engine's vocabulary has 99 ids and the trainer's model 64"),
        (Server(policy_version=3), "the engine has policy version 3 and the trainer 0"),
    ],
)
async def test_an_engine_of_another_model_or_of_newer_weights_is_refused_at_the_start(tmp_path, server, message):
    with pytest.raises(InvalidInputError, match=message):
        await run(Data(server), tmp_path)


async def test_what_comes_after_a_step_is_done_again_once_its_engine_is_back_with_the_weights(tmp_path):
    """As an evaluation, which raises OutageError if it lost rollouts."""

    async def after_step(num_steps: int) -> None:
        calls.append((num_steps, server.policy_version))
        if num_steps == 2 and len(calls) == 2:
            server.goes_away(3)
            raise OutageError("the evaluation lost its engine")

    server, calls = Server(), []
    data = Data(server)
    await run(data, tmp_path, after_step=after_step)
    assert_whole(data, tmp_path)
    assert calls == [(1, 1), (2, 2), (2, 2), (3, 3), (4, 4)]
    assert server.loaded == [1, 2, 2, 3, 4]
    assert [line["outages/num_losses"] for line in lines(tmp_path)] == [0, 0, 1, 0]
    assert lines(tmp_path)[2]["seconds/outages"] > 0.02
    assert min(line[f"seconds/{name}"] for line in lines(tmp_path) for name in ("collect", "after_step")) >= 0


@pytest.mark.parametrize(("engine", "message"), [(True, "lost 5 times although the engine came back"), (False, "gone")])
async def test_what_fails_after_a_step_each_time_ends_the_run_where_it_can_go_on(tmp_path, engine, message):
    async def after_step(num_steps: int) -> None:
        calls.append(num_steps)
        if num_steps == 2:
            raise OutageError("gone")

    calls: list[int] = []
    with pytest.raises(OutageError, match=rf"{message}.*stands after 2 steps"):
        await run(Data(Server()), tmp_path, after_step=after_step, engine=engine)
    assert calls == [1, *[2] * (5 if engine else 1)]
