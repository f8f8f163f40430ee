"""All steps of a run, as one call."""

from unbroken.training.groups import GroupSource
from unbroken.training.loop import open_steps


async def train(source: GroupSource, **parts) -> None:
    """Open the steps of a run (`open_steps`), and make them."""
    async with open_steps(source, **parts) as steps:
        await steps.run()
