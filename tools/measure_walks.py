"""Print how many functions and files lie on two ways through the package, traced in real runs of a few seconds.

From the command line: `unbroken train` makes one step with a tiny model. From an agent's request: the second turn of a
session of a gateway. A way is all functions of the package that have not returned when one of its `MARKS` is called,
also those that started the task or thread in which that happens.
`--names` prints them; `--json` prints the four numbers, for `measure_house.py`.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = f"{ROOT / 'src' / 'unbroken'}{os.sep}"
sys.path.insert(0, str(ROOT / "tests"))

MARKS = (
    "engines/*.sample",
    "bridge_to_next_turn",
    "add_sampled",
    "export_samples",
    "store/*.commit",
    "torch/optim/*.step",
)
"""Functions with these names; before `*`, in files of this folder."""

Step = tuple[str, str]
"""A file and the name of a function in it."""
_started_by: contextvars.ContextVar[frozenset[Step]] = contextvars.ContextVar("started_by", default=frozenset())


def main() -> None:
    """Print both ways."""
    walks = {"walk, command line to optimizer": train_a_step(), "walk, request of an agent": ask()}
    if "--json" in sys.argv[1:]:
        counts = {f"{title}: functions": len(steps) for title, steps in walks.items()}
        print(json.dumps(counts | {f"{title}: files": len({file for file, _ in s}) for title, s in walks.items()}))
        return
    print(f"{'':52}{'functions':>10}{'files':>8}")
    for title, steps in walks.items():
        print(f"{title:52}{len(steps):10}{len({file for file, _ in steps}):8}")
        if "--names" in sys.argv[1:]:
            print(*sorted(f"  {file} {name}" for file, name in steps), sep="\n")


def train_a_step() -> set[Step]:
    """The way of one step of the recipe `sums`, without preflight and evaluations, which sample and train nothing."""
    from support.served import save_tiny_model
    from unbroken.cli import main as run_command

    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_model(Path(folder, "model"))
        recipe = ROOT / "recipes" / "sums" / "recipe.toml"
        words = ["train", str(recipe), f"--model={model}", f"--output={folder}/run", "--loop.num-steps=1"]
        words += ["--rollouts.problems-per-step=2", "--rollouts.group-size=4", "--evaluation.num-problems=0"]
        words += ["--preflight=false"]
        with traced() as steps, redirect_stdout(sys.stderr):
            assert run_command(words) == 0
    return steps


def ask() -> set[Step]:
    """The way of the second request of a session."""
    return asyncio.run(_ask())


async def _ask() -> set[Step]:
    from support.gateways import CALL, USER, ask, result, running_gateway, scripted

    with tempfile.TemporaryDirectory() as folder:
        engine = scripted("Let me look." + CALL, "17.<|im_end|>")
        with traced() as steps:  # from the start, as a thread is traced from its own
            async with running_gateway(engine, Path(folder)) as gateway:
                agent = gateway.agent(await gateway.create())
                first = await ask(agent, [USER])
                steps.clear()
                await ask(agent, [USER, first, result(first)])
                return steps.copy()


@contextmanager
def traced() -> Iterator[set[Step]]:
    """Collect the functions on the way to each of the marks, over tasks and threads, while the block runs."""
    from unbroken.threads import DaemonThreads

    found: set[Step] = set()

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and any(_is_mark(frame.f_code, mark) for mark in MARKS):
            found.update(find_way(frame))

    create_task, submit, run = asyncio.BaseEventLoop.create_task, ThreadPoolExecutor.submit, DaemonThreads.run

    def create_linked(self: Any, coroutine: Any, *, context: Any = None, **options: Any) -> Any:
        return create_task(self, coroutine, context=_link(context), **options)

    def submit_linked(self: Any, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return submit(self, _link(None).run, function, *arguments, **options)

    async def run_linked(self: Any, function: Callable[[], Any]) -> Any:
        return await run(self, partial(_link(None).run, function))

    def patch(*functions: Any) -> None:
        asyncio.BaseEventLoop.create_task, ThreadPoolExecutor.submit, DaemonThreads.run = functions

    patch(create_linked, submit_linked, run_linked)
    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        patch(create_task, submit, run)


def find_way(frame: Any) -> set[Step]:
    """The package's functions from the start of the program to this frame."""
    steps = set(_started_by.get())
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            steps.add((code.co_filename.removeprefix(PACKAGE), code.co_qualname))
        frame = frame.f_back
    return steps


def _link(context: contextvars.Context | None) -> contextvars.Context:
    """A copy of the context that knows who starts what will run in it."""
    linked = context.copy() if context is not None else contextvars.copy_context()
    linked.run(_started_by.set, frozenset(find_way(sys._getframe(1))))
    return linked


def _is_mark(code: Any, mark: str) -> bool:
    folder, _, name = mark.rpartition("*.")
    return code.co_name == name and (
        f"/{folder}" in code.co_filename if folder else code.co_filename.startswith(PACKAGE)
    )


if __name__ == "__main__":
    main()
