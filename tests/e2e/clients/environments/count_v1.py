"""A tool with a state for tasksets of verifiers 0.4: the count of each attempt is its own."""

from __future__ import annotations

import verifiers.v1 as vf


class Counted(vf.State):
    calls: int = 0


class Counter(vf.Toolset[vf.ToolsetConfig, Counted]):
    TOOL_PREFIX = None

    @vf.tool
    async def count(self) -> str:
        """Count one more."""
        self.state.calls += 1
        return str(self.state.calls)


if __name__ == "__main__":
    Counter.run()
