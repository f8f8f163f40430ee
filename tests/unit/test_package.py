import subprocess
import sys

import pytest

import unbroken
from unbroken.cli import main


@pytest.mark.parametrize("module", ["unbroken", "unbroken.cli", "unbroken.rollout.runner", "unbroken.engines.scripted"])
def test_importing_what_knows_no_tensors_loads_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importing_the_package_loads_nothing_else():
    code = "import sys; before = set(sys.modules); import unbroken; print(*(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert loaded == ["unbroken"]


def test_the_command_says_its_version(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert unbroken.__version__ in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["dance"], ["demo", "--seed", "x"]])
def test_wrong_usage_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as done:
        main(arguments)
    assert done.value.code == 2
    assert "usage: unbroken" in capsys.readouterr().err


def test_an_error_of_ours_is_one_line_and_status_1(capsys, tmp_path):
    assert main(["demo", "--steps", "0", "--output", str(tmp_path)]) == 1
    assert "num_steps must be >= 1, got 0" in capsys.readouterr().err
