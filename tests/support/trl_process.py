"""One of two processes that make rollouts for TRL together; each writes its errors, by case."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from support.rollouts import HELLO
from support.scripted_env import ScriptedEnv
from support.trl_stand_in import make, stand_in
from unbroken.engines.scripted import ScriptedEngine
from unbroken.errors import UnbrokenError
from unbroken.weights.base import InProcessPublisher


@asynccontextmanager
async def open_engine(*given: Any) -> AsyncIterator[Any]:
    """Make an engine and its publisher."""
    yield given


def main(directory: Path) -> None:
    """Run every case and write its result."""
    trainer = stand_in()
    rank = trainer.accelerator.process_index
    engine = ScriptedEngine(lambda _: HELLO)
    outcomes = {}

    def play(case: str, rollouts) -> None:
        with rollouts:
            try:
                rows = rollouts(["a", "a"], trainer)
                outcomes[case] = [rows["env_mask"], engine.policy_version]
            except UnbrokenError as error:
                outcomes[case] = f"{type(error).__name__}: {error}"

    def broken(_):
        return ScriptedEnv([ValueError("boom")])

    play("both publish", make(lambda _: ScriptedEnv(), engine))
    play("all of one fail", make(broken if rank == 0 else lambda _: ScriptedEnv(), engine))
    play("all of both fail", make(broken, engine))
    play(
        "one has old weights",
        make(engine=lambda: open_engine(engine, InProcessPublisher(engine) if rank == 0 else None)),
    )
    play("no process publishes", make(engine=lambda: open_engine(engine, None)))
    (directory / f"{rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
