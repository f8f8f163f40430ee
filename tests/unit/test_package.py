import argparse
import ast
import importlib
import io
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import unbroken
import unbroken.runs.command
from unbroken.cli import _parser, main


def _imports_for_type_checkers():
    """The modules of the names below `if TYPE_CHECKING`."""
    tree = ast.parse(Path(unbroken.__file__).read_text("utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    return {alias.name: line.module for line in block.body for alias in line.names}


PUBLIC_MODULES = _imports_for_type_checkers()


@pytest.mark.parametrize("module", ["unbroken", "unbroken.cli", "unbroken.rollout.runner", "unbroken.engines.scripted"])
def test_importing_what_knows_no_tensors_loads_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importing_the_package_loads_nothing_else():
    code = "import sys; before = set(sys.modules); import unbroken; print(*(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert loaded == ["unbroken"]


def test_the_command_line_loads_no_arrays_and_no_http():
    """They take longer than everything else that `unbroken --help` does."""
    code = "import sys, unbroken.cli; print(*sorted({'numpy', 'urllib.request', 'torch'} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert loaded == []


EXTRAS = "accelerate datasets fastapi httpx orjson peft PIL prometheus_client psycopg pydantic rich torch uvicorn vllm"


@pytest.mark.parametrize("command", ["", "serve", "gateway", "train", "export", "audit", "demo", "new", "view"])
def test_help_needs_no_extra(command):
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({EXTRAS.split()}))\n"
        f"from unbroken.cli import _parser, main; main({[*command.split(), '--help']})"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"usage: unbroken {command}".rstrip())


def test_a_wrong_option_of_the_embedded_engine_is_refused_before_torch_is_loaded(monkeypatch, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit):
        main(["serve", str(tmp_path), "--engine", "transformers", "--max-len", "30"])
    assert "unrecognized arguments: --max-len 30" in capsys.readouterr().err


def test_a_server_without_torch_names_its_extra_before_it_looks_for_a_model(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["serve", "no-such-model"]) != 0
    assert "serving needs the serve extra: pip install 'unbroken[serve]'" in capsys.readouterr().err


def parsers(parser=None, words=()):
    """The words of every command, and of the commands inside it, with its parser."""
    parser = parser or _parser()
    yield words, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from parsers(inner, (*words, name))


RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize(
    "words",
    [
        *(words for words, _ in parsers()),
        ("train", "--env", "file.py:Class"),
        *(("train", str(path)) for path in (*RECIPES.rglob("*.toml"), RECIPES / "lookup.py")),
        ("eval", str(RECIPES / "sums" / "recipe.toml")),
    ],
    ids=" ".join,
)
def test_help_fits_on_two_screens_and_help_all_names_every_option(words, capsys):
    texts = []
    for option in ("--help", "--help-all"):
        with suppress(SystemExit):
            main([*words, option])
        texts.append(capsys.readouterr().out)
    short, whole = texts
    assert short.startswith("usage: unbroken")
    assert len(short.splitlines()) <= 100
    assert set(re.findall(r"--[a-z][\w-]*", short)) <= set(re.findall(r"--[a-z][\w-]*", whole)) | {"--help-all"}
    if words in dict(parsers()):
        for action in dict(parsers())[words]._actions:
            assert all(option in whole for option in action.option_strings)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_and_fields(shell, tmp_path, monkeypatch, capsys):
    pytest.importorskip("shtab")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", f"/bin/{shell}")
    with pytest.raises(SystemExit) as done:
        main(["--install-completion"])
    assert done.value.code == 0
    (written,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert str(written) in capsys.readouterr().out
    text = written.read_text("utf-8")
    assert "gateway" in text
    assert "rollouts.group-size" in text.replace("\\", "")


def test_completion_needs_a_shell_that_is_known(monkeypatch, capsys):
    monkeypatch.setenv("SHELL", "/bin/dash")
    with pytest.raises(SystemExit):
        main(["--install-completion"])
    assert "must be followed by one of bash, fish, zsh, got 'dash'" in capsys.readouterr().err


def test_bash_completes_commands_and_fields(tmp_path, monkeypatch):
    pytest.importorskip("shtab")
    monkeypatch.setenv("HOME", str(tmp_path))
    with suppress(SystemExit):
        main(["--install-completion", "bash"])
    (written,) = (path for path in tmp_path.rglob("*") if path.is_file())
    for typed, expected in (("tr", "train"), ("train t.toml --loop.num-s", "--loop.num-steps")):
        script = (
            f"source {written}; COMP_WORDS=(unbroken {typed}); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1)); "
            '_shtab_unbroken; echo "${COMPREPLY[@]}"'
        )
        printed = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True).stdout
        assert printed.split() == [expected]


@pytest.mark.parametrize("name", [name for name in unbroken.__all__ if name != "VllmEngine"])
def test_a_public_name_is_the_object_of_its_module(name):
    value = getattr(unbroken, name)
    assert value is getattr(importlib.import_module(PUBLIC_MODULES[name]), name)
    assert vars(unbroken)[name] is value  # so that the next use does not look it up again


@pytest.mark.filterwarnings("ignore")  # vllm's own
def test_the_public_vllm_engine_is_the_object_of_its_module():
    pytest.importorskip("vllm")
    from unbroken.engines.vllm import VllmEngine

    assert unbroken.VllmEngine is VllmEngine


def test_the_public_names_are_those_that_type_checkers_see():
    assert sorted(PUBLIC_MODULES) == sorted(unbroken.__all__)
    assert set(unbroken.__all__) <= set(dir(unbroken))


def test_public_names_without_torch_load_no_torch():
    names = (
        "TemplateRenderer, load_renderer, SamplingParams, Limits, tool, Env, ToolEnv, run_rollout, run_group, Client"
    )
    code = f"import sys; from unbroken import {names}; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("AsyncClient", "httpx", "client"),
        ("HttpEngine", "httpx", "client"),
        ("TransformersEngine", "torch", "train"),
        ("VllmEngine", "vllm", "vllm"),
        ("Trainer", "accelerate", "train"),
        ("open_steps", "torch", "train"),
    ],
)
def test_a_missing_dependency_names_the_extra_that_installs_it(name, package, extra):
    code = f"""
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
from unbroken import {name}
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    expected = f"unbroken.{name} needs {package}, which is not installed: pip install 'unbroken[{extra}]'"
    assert f"ModuleNotFoundError: {expected}" in done.stderr


def test_training_with_the_embedded_engine_needs_no_other_extra():
    """As `pip install 'unbroken[train]'` has it: `tools/check_extras.py` installs it really, in minutes."""
    code = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in {"httpx", "orjson", "fastapi", "uvicorn", "fsspec.implementations.http", "vllm", "peft"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import unbroken.runs.run, unbroken.runs.training, unbroken.runs.policy_check, unbroken.runs.evaluate
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'unbroken' has no attribute 'nonsense'"):
        unbroken.nonsense  # noqa: B018


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


def test_a_reader_that_goes_away_ends_the_command_without_a_traceback(monkeypatch):
    def run(arguments):
        print("much text")
        return 0

    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(unbroken.runs.command, "_run_train", run)
    with os.fdopen(writing, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["train", "recipe.toml"]) == 128 + signal.SIGPIPE


def test_a_connection_that_breaks_is_its_own_error_where_the_output_is_no_file(monkeypatch):
    def run(arguments):
        raise BrokenPipeError("the server went away")

    monkeypatch.setattr(unbroken.runs.command, "_run_train", run)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with pytest.raises(BrokenPipeError, match="the server went away"):
        main(["train", "recipe.toml"])


def test_an_error_of_ours_is_one_line_and_status_1(capsys, tmp_path):
    assert main(["demo", "--steps", "0", "--output", str(tmp_path)]) == 1
    assert "--steps must be >= 1, got 0" in capsys.readouterr().err


def test_every_connection_of_ours_has_a_time_out_of_its_own():
    """httpx's own one of 5 s is another in tests (conftest.py), so nothing of ours may depend on it."""
    makers = {"Client", "AsyncClient", "get", "post", "put", "delete", "head", "request", "stream"}
    calls = [
        (path, call)
        for path in sorted(Path(unbroken.__file__).parent.rglob("*.py"))
        if "httpx" in (text := path.read_text("utf-8"))
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "httpx"
        and call.func.attr in makers
    ]
    assert len(calls) >= 3
    without = [f"{path}:{call.lineno}" for path, call in calls if "timeout" not in {each.arg for each in call.keywords}]
    assert without == []
