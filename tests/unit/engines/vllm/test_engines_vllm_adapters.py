"""vLLM whose policy is a LoRA adapter: each version beside those that requests still use."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.adapted import with_lora
from support.publishing import mismatch
from unbroken.errors import InvalidInputError, SamplingError
from unbroken.training.config import LoraUpdates, TrainerConfig
from unbroken.training.trainer import Trainer
from unbroken.types import SampleRequest, SampleResult, SamplingParams, token_ids
from unbroken.weights.base import InProcessPublisher
from unbroken.weights.files import FileSource, write_weights
from unbroken.weights.sources import TensorSource

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT_IDS = token_ids(np.random.default_rng(0).integers(0, 64, 100).tolist())


def trainer(seed: int, *, lora_updates: LoraUpdates = LoraUpdates.ADAPTER, **lora: Any) -> Trainer:
    from support.vllm_engines import tiny_vllm_model

    return Trainer(with_lora(tiny_vllm_model(), seed=seed, **lora), TrainerConfig(lora_updates=lora_updates))


def ask(request_id: str, max_tokens: int = 20, adapter: str | None = None) -> SampleRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=1)
    return SampleRequest(request_id=request_id, prompt_ids=PROMPT_IDS, params=params, adapter=adapter)


def open_rows() -> list[str]:
    """The memory of weights that this process has open."""
    links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [link for link in links if "unbroken-weights" in link]


async def find_distance(trained: Trainer, result: SampleResult) -> float:
    """By how much the logprobs of a completion of `PROMPT_IDS` differ from a trainer's, at most."""
    from support.rows import row

    (sequence,) = result.sequences
    ids = [*PROMPT_IDS.tolist(), *sequence.completion_ids.tolist()]
    (expected,) = await asyncio.to_thread(trained.logprobs, [row(ids, sampled=range(len(PROMPT_IDS), len(ids)))])
    return float(np.abs(sequence.rollout_logprobs - expected[len(PROMPT_IDS) :]).max())


async def assert_sampled_by(engine: Any, trained: Trainer, result: SampleResult, version: int) -> None:
    """Check logprobs and versions of a completion of `PROMPT_IDS`, whose KV no other version may have computed."""
    (sequence,) = result.sequences
    assert await find_distance(trained, result) < 2e-5
    assert [(span.start, span.stop, span.policy_version) for span in sequence.version_spans] == [
        (0, len(sequence.completion_ids), version)
    ]


async def test_the_policy_of_vllm_is_the_adapter_that_came_last_and_requests_keep_theirs(tmp_path: Path) -> None:
    from support.vllm_engines import save_model, start_engine, tiny_vllm_model

    save_model(tmp_path / "model", tiny_vllm_model())
    engine = await start_engine(tmp_path / "model", "--enable-lora", "--max-lora-rank", "8", "--max-loras", "4")
    first, second, third = [trainer(seed, r=rank, lora_alpha=6) for seed, rank in ((1, 4), (2, 8), (3, 2))]
    try:
        await check_that_requests_keep_their_adapter(engine, first, second)
        await check_that_there_is_room_for_three(engine, first, second, third)
        await check_files_and_sleep(engine, third, tmp_path / "weights")
        await check_refusals(engine)
        assert engine.policy_version == 5
        assert await mismatch(third, engine) < 1e-5
        assert not open_rows()
    finally:
        await engine.close()


async def check_that_requests_keep_their_adapter(engine: Any, first: Trainer, second: Trainer) -> None:
    """Versions 1 and 2. The prompt is the same each time, so its KV would be found if vLLM took adapters for one."""
    publisher = InProcessPublisher(engine)
    await publisher.publish(first.named_weights(), policy_version=1)
    assert await mismatch(first, engine) < 1e-5
    await assert_sampled_by(engine, first, await engine.sample(ask("before")), 1)

    # The first version's request goes on beside the second's, and its adapter is dropped when it has ended.
    await engine.pause()
    running = asyncio.create_task(engine.sample(ask("long", max_tokens=150)))
    await asyncio.sleep(0)  # it takes its adapter
    assert (await publisher.publish(second.named_weights(), policy_version=2)).num_bytes < 40_000
    assert engine.policy_version == 2
    now = asyncio.create_task(engine.sample(ask("now")))
    assert [len(each) for each in await engine._calls.rpc("list_loras")] == [2]
    await engine.resume()
    await assert_sampled_by(engine, second, await now, 2)
    await assert_sampled_by(engine, first, await running, 1)
    assert await mismatch(second, engine) < 1e-5
    while len((await engine._calls.rpc("list_loras"))[0]) > 1:  # noqa: ASYNC110  # it lives in another process
        await asyncio.sleep(0.01)


async def check_that_there_is_room_for_three(engine: Any, first: Trainer, second: Trainer, third: Trainer) -> None:
    """Versions 3 and 4, while requests take them and version 2; a fifth is refused."""
    publisher = InProcessPublisher(engine)
    await engine.pause()
    held = [asyncio.create_task(engine.sample(ask("second", max_tokens=150)))]
    for version, one in ((3, first), (4, second)):
        await publisher.publish(one.named_weights(), policy_version=version)
        held.append(asyncio.create_task(engine.sample(ask(f"version {version}", max_tokens=150))))
        await asyncio.sleep(0)  # it takes its adapter
    with pytest.raises(SamplingError, match=r"versions \[2, 3, 4\] are in flight, and there is no room"):
        await publisher.publish(third.named_weights(), policy_version=5)
    await engine.resume()
    for version, one, result in zip((2, 3, 4), (second, first, second), await asyncio.gather(*held), strict=True):
        await assert_sampled_by(engine, one, result, version)


async def check_files_and_sleep(engine: Any, third: Trainer, folder: Path) -> None:
    """Version 5, from files, and while the engine sleeps."""
    await engine.sleep()
    files = write_weights(folder, third.named_weights(), policy_version=5)
    await engine.update_weights(FileSource(files.folder), policy_version=5)
    assert await mismatch(third, engine) < 1e-5
    chunks = [chunk async for chunk in engine.stream(ask("stream"))]
    assert [span.policy_version for span in chunks[-1].version_spans] == [5]


async def check_refusals(engine: Any) -> None:
    for refused, message in (
        (trainer(4, r=16).named_weights(), r"rank must be at most 8 \(--max-lora-rank\), got 16 for '.*proj'"),
        ([("x.lora_A.weight", update_of(1, 3)), ("x.lora_B.weight", update_of(3, 1))], "no weight named 'x.weight'"),
        (trainer(4, lora_updates=LoraUpdates.MERGED).named_weights(), "has the adapter of policy version 5"),
        (
            [
                ("model.embed_tokens.lora_A.weight", update_of(1, 32)),
                ("model.embed_tokens.lora_B.weight", update_of(64, 1)),
            ],
            r"module 'model.embed_tokens' takes no adapter in this engine, only \[",
        ),
    ):
        with pytest.raises(SamplingError, match=message):
            await engine.update_weights(TensorSource(refused), policy_version=6)


async def test_what_more_adapters_would_take_is_said_for_a_cpu_and_for_a_gpu() -> None:
    from unbroken.engines.vllm.policy_adapters import _describe_room

    config, begin = SimpleNamespace(max_loras=2, max_cpu_loras=4), "vLLM's --max-loras is 2, and N adapters need "
    assert _describe_room(config, 0, is_cpu=True) == f"{begin}2 N + 1 on a CPU"
    assert _describe_room(config, 0, is_cpu=False) == f"{begin}N, or a --max-cpu-loras of 2 N (it is 4)"
    assert _describe_room(config, 2, is_cpu=False).endswith("(it is 4), and room for 2 others")


def update_of(*shape: int) -> Any:
    import torch

    return torch.zeros(shape)


def weights_of(**trained: Trainer) -> TensorSource:
    """An update of several policies."""
    return TensorSource([(f"{name}/{key}", each) for name, one in trained.items() for key, each in one.named_weights()])


async def test_several_policies_of_one_engine_have_their_own_adapters_versions_and_kv(tmp_path: Path) -> None:
    """All requests have the same prompt of three blocks: KV of another policy or version would show in the logprobs."""
    from support.vllm_engines import save_adapter, save_model, start_engine, tiny_vllm_model

    save_model(tmp_path / "model", tiny_vllm_model())
    save_adapter(tmp_path / "adapter")
    engine = await start_engine(
        tmp_path / "model", "--enable-lora", "--max-lora-rank", "8", "--max-loras", "6",
        adapters=(("pirate", str(tmp_path / "adapter")),),
    )  # fmt: skip
    left, right, newer = [trainer(seed, r=rank, lora_alpha=6) for seed, rank in ((1, 4), (2, 8), (3, 2))]
    base = Trainer(tiny_vllm_model(), TrainerConfig())
    room = engine.adapter_room
    assert (room.max_adapters, room.max_rank) == (2, 8)
    assert room.how == "vLLM's --max-loras is 6, and N adapters need 2 N + 1 on a CPU, and room for 1 other"
    assert room.how_rank == "vLLM's --max-lora-rank is 8"
    try:
        await check_policies_beside_each_other(engine, left, right, base)
        await check_a_request_of_one_policy_goes_on(engine, left, right, newer)
        await check_policies_from_files_and_sleep(engine, left, newer, base, tmp_path / "weights")
        await check_refused_policies(engine, left)
        await check_that_another_adapter_takes_no_room_of_policies(engine, base, tmp_path / "adapter")
        assert not open_rows()
    finally:
        await engine.close()


async def check_policies_beside_each_other(engine: Any, left: Trainer, right: Trainer, base: Trainer) -> None:
    await engine.update_weights(weights_of(left=left, right=right), policy_version=1)
    assert engine.adapters == ("pirate", "left", "right")
    for turn in range(2):  # the second time the prompt's KV is there, of each policy
        asked = [ask(f"{turn}-{name}", adapter=name) for name in ("left", "right", None)]
        results = await asyncio.gather(*map(engine.sample, asked))
        for own, result in zip((left, right, base), results, strict=True):
            await assert_sampled_by(engine, own, result, 1)
            for other in (left, right, base):
                assert other is own or await find_distance(other, result) > 0.05


async def check_a_request_of_one_policy_goes_on(engine: Any, left: Trainer, right: Trainer, newer: Trainer) -> None:
    """Version 2 changes one policy: a request of the other and one of the same end as they began."""
    await engine.pause()
    running = [asyncio.create_task(engine.sample(ask(f"long {n}", 150, n))) for n in ("left", "right")]
    await asyncio.sleep(0)  # they take their adapters
    await engine.update_weights(weights_of(left=newer, right=right), policy_version=2)
    now = [asyncio.create_task(engine.sample(ask(f"now {n}", adapter=n))) for n in ("left", "right")]
    with pytest.raises(SamplingError, match=r"versions \[1, 2\] are in flight, and there is no room for 2 more"):
        await engine.update_weights(weights_of(left=left, right=right), policy_version=3)
    await engine.resume()
    for own, task, version in ((left, running[0], 1), (right, running[1], 1), (newer, now[0], 2), (right, now[1], 2)):
        await assert_sampled_by(engine, own, await task, version)


async def check_policies_from_files_and_sleep(
    engine: Any, left: Trainer, newer: Trainer, base: Trainer, folder: Path
) -> None:
    """Version 3, with another set of policies, one of which is a frozen copy."""
    await engine.sleep()
    source = weights_of(left=newer, **{"left@1": left})
    files = write_weights(folder, source.tensors, policy_version=3)
    await engine.update_weights(FileSource(files.folder), policy_version=3)
    names = ("left", "left@1", None)
    results = await asyncio.gather(*(engine.sample(ask(f"three {name}", adapter=name)) for name in names))
    for own, result in zip((newer, left, base), results, strict=True):
        await assert_sampled_by(engine, own, result, 3)
    with pytest.raises(SamplingError, match=r"one of \['left', 'left@1', 'pirate'\], got 'right'"):
        await engine.sample(ask("gone", adapter="right"))


async def check_refused_policies(engine: Any, left: Trainer) -> None:
    single = list(left.named_weights())
    for refused, message in (
        (
            weights_of(a=left, b=left, c=left),
            r"room for 2 versions of the adapters of \['a', 'b', 'c'\], got 4 beside 1",
        ),
        (weights_of(pirate=left), r"must not have the name of another adapter of the engine, got \['pirate'\]"),
        (TensorSource([*single, (f"left/{single[0][0]}", single[0][1])]), "a policy for each matrix or for none"),
        (TensorSource([(f"left/{name}", each) for name, each in single[1:]]), "came alone"),
    ):
        with pytest.raises(SamplingError, match=message):
            await engine.update_weights(refused, policy_version=4)
    assert engine.policy_version == 3


async def check_that_another_adapter_takes_no_room_of_policies(engine: Any, base: Trainer, folder: Path) -> None:
    """It would have the last slot while two versions are in use, and vLLM on a CPU applies that one to the model."""
    with pytest.raises(InvalidInputError, match="room for 4 adapters of policies, got 3 beside 2 other adapters"):
        await engine.load_adapter("parrot", folder)
    await assert_sampled_by(engine, base, await engine.sample(ask("still the model")), 3)


async def test_an_engine_without_lora_or_room_refuses_adapters(shared_vllm: Any) -> None:
    room = r"room for 2 versions .* got \d beside \d other adapters: .*--max-loras"
    replaced = r"which the whole weights of policy version \d+ have replaced"  # where another test has updated it
    with pytest.raises(SamplingError, match=f"{room}|{replaced}"):
        await shared_vllm.engine.update_weights(
            TensorSource(trainer(1).named_weights()), policy_version=shared_vllm.engine.policy_version + 1
        )
