"""The adapters of environments load the packages that they adapt only when they are used."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_adapters_loads_none_of_the_packages():
    code = (
        "import sys; from unbroken.integrations import gym, mcp, nemo_gym, openenv, reasoning_gym; "
        "packages = {'gymnasium', 'textarena', 'reasoning_gym', 'openenv', 'mcp', 'websockets', 'httpx', 'torch'}; "
        "print(*packages & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []
