"""A tool for tasksets of verifiers 0.4. A tool server is a module of its own, as verifiers starts it by its module."""

from __future__ import annotations

import verifiers.v1 as vf


class Look(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def look(self, cell: int) -> str:
        """Look into a cell."""
        return str(cell + 13)


if __name__ == "__main__":
    Look.run()
