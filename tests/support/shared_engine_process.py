"""One of two processes that share an engine, which the first one hosts.

Arguments: a folder with a model, and one that takes the results.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import AutoModelForCausalLM

from unbroken.engines.base import SleepingEngine
from unbroken.engines.transformers import TransformersEngine
from unbroken.errors import EngineError, TrainingError
from unbroken.runs.engines import RunEngine, share_engine
from unbroken.runs.processes import Rank
from unbroken.types import SampleRequest, SamplingParams, token_ids

IDS = token_ids([1, 2, 3, 4, 5])
CPU = torch.device("cpu")


def changed(model: Any, version: int) -> Any:
    """The model with other weights."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 0.01 * version)
    return model


async def sample(found: RunEngine, number: int) -> list[Any]:
    """The versions of a completion, and the scores of some ids."""
    params = SamplingParams(max_tokens=8, seed=number)
    requests = [SampleRequest(request_id=f"{number}/{k}", prompt_ids=IDS, params=params) for k in range(4)]
    results = await asyncio.gather(*map(found.engine.sample, requests))
    versions = sorted({span.policy_version for one in results for span in one.sequences[0].version_spans})
    return [versions, (await found.engine.score(IDS)).logprobs.tolist()]


async def run(source: Path, rank: Rank) -> dict[str, Any]:
    async def start() -> SleepingEngine:
        return TransformersEngine(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32))

    async def fail() -> SleepingEngine:
        raise EngineError("no room")

    try:
        async with share_engine(fail, source=source, rank=rank, size=2, device=CPU):
            pass
    except (EngineError, TrainingError) as error:
        failure = str(error)
    steps = []
    async with share_engine(start, source=source, rank=rank, size=2, device=CPU) as found:
        for version in (0, 1, 2):
            if version:
                if found.before_update is not None:
                    await found.before_update()
                gather_object([None])
                if found.publisher is not None:
                    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
                    await found.publisher.publish(changed(model, version).named_parameters(), policy_version=version)
                gather_object([None])
            # The first process waits in a collective operation, which blocks its loop, while the second one samples.
            if rank.index == 1:
                time.sleep(0.3)  # noqa: ASYNC251  # so that the first one waits
            steps.append(await sample(found, version))
            gather_object([None])
    return {"failure": failure, "steps": steps, "hosts": found.publisher is not None}


def main() -> None:
    """Run, and write what this process saw."""
    faulthandler.dump_traceback_later(400, exit=True)
    source, directory = map(Path, sys.argv[1:3])
    rank = Rank(index=int(os.environ["RANK"]), num_processes=2)
    torch.set_num_threads(1)
    Accelerator(cpu=True)
    (directory / f"{rank.index}.json").write_text(json.dumps(asyncio.run(run(source, rank))))
    gather_object([None])
    os._exit(0)  # taking gloo's threads down in order hangs now and then, after all the work is done


if __name__ == "__main__":
    main()
