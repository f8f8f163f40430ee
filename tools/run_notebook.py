"""Run a notebook in the current folder and keep what its cells print: `python tools/run_notebook.py NOTEBOOK`.

A cell is `%%writefile FILE`, one line of `!COMMAND`, or Python that prints; no Jupyter is needed. The folder must be
empty.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any


def run_cell(source: str, names: dict[str, Any]) -> str:
    """What a code cell prints; Python runs among `names`. A command that fails raises `CalledProcessError`."""
    if source.startswith("%%writefile "):
        name, _, content = source.removeprefix("%%writefile ").partition("\n")
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
        return f"Writing {name}\n"
    if source.startswith("!"):
        return subprocess.run(["bash", "-c", source[1:]], stdout=subprocess.PIPE, text=True, check=True).stdout
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(source, "a cell", "exec"), names)
    return printed.getvalue()


def get_saved(cell: dict[str, Any]) -> str:
    """What is saved of a code cell's output."""
    return "".join("".join(each["text"]) for each in cell["outputs"])


def main(path: Path) -> None:
    """Run all cells and write the notebook again."""
    notebook, names = json.loads(path.read_text("utf-8")), {"__name__": "a_notebook"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, start=1):
        printed = run_cell("".join(cell["source"]), names)
        lines = printed.replace(f"{Path.cwd()}/", "").splitlines(keepends=True)  # no path of this machine
        output = {"name": "stdout", "output_type": "stream", "text": lines}
        cell |= {"execution_count": number, "outputs": [output] if lines else []}
        print(f"{path.name}: cell {number} of {len(code)}", file=sys.stderr)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
