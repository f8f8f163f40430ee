"""`unbroken audit` as a user runs it: folders, files, options, and everything that can be wrong with them."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from support import templates
from support.audits import model_folder
from unbroken.cli import main

FEW = ("--conversations", "20")
HEADS = "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), templates.QWEN_THINKING)


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    status = main(["audit", *map(str, arguments)])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_a_models_folder_is_audited(model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "audit.html"
    status, out, err = run(capsys, model, *FEW, "--html", page)
    assert status == 0
    assert all(line.endswith(" so far") for line in err.splitlines())  # of its progress, where it takes 10 s
    assert "Fit for multi-turn training" in out
    assert "stand-in" not in out
    assert page.read_text("utf-8").startswith("<!doctype html>")
    assert str(page) in out


def test_the_report_is_json_and_nothing_else(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, model, *FEW, "--json", "--seed", 7)
    report = json.loads(out)
    assert status == report["exit_code"] == 0
    assert report["about"]["seed"] == 7
    assert report["about"]["name"] == str(model)
    assert 5 in {stop["token_id"] for stop in report["turn_ends"]["stops"]}, "the generation config's"
    assert report["fuzz"]["num_exact"] == 20


def test_options_reach_the_template_and_unread_ones_are_reported(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--option", "enable_thinking=false", "--option", "enable_thinkin=yes")
    status, out, err = run(capsys, model, *FEW, "--json", *options)
    assert status == 0
    assert json.loads(out)["about"]["options"] == {"enable_thinking": False, "enable_thinkin": "yes"}
    assert json.loads(out)["about"]["unread_options"] == ["enable_thinkin"]
    assert "the template never reads the option 'enable_thinkin'" in err


def test_a_template_takes_the_place_of_the_models(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.jinja"
    file.write_text(templates.CHATML)
    status, out, _ = run(capsys, model, "--template", file, *FEW)
    assert status == 3
    assert "renders no calls" in out


def test_a_template_alone_gets_a_stand_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(templates.QWEN)
    status, out, _ = run(capsys, "--template", file, *FEW)
    assert status == 0
    assert "a stand-in, as no model was given" in out


def test_a_named_parser_is_the_one_that_reads(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, model, *FEW, "--json", "--parser", "none")
    assert status == 3
    assert json.loads(out)["round_trip"]["parser"] == "none"
    assert json.loads(out)["round_trip"]["differences"]["calls"] > 0


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "longer than 2 s"),
        ("{{ 'x' * 10 ** 12 }}", "goes over a limit"),
        (HEADS + "{# " + "x" * 3_000_000 + " #}", "characters"),
        ("{% for m in messages %}{{ m.content }", "does not compile"),
        ("Hello.", "must be a Jinja template"),
    ],
    ids=["endless", "huge", "long", "broken", "text"],
)
def test_a_hostile_template_is_an_error_in_time(
    source: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "hostile.jinja"
    file.write_text(source)
    start = time.monotonic()
    status, out, err = run(capsys, "--template", file, *(("--timeout", 2) if "longer" in expected else ()))
    assert time.monotonic() - start < 100
    assert status == 1
    assert out == ""
    assert expected in err
    assert "Traceback" not in err


def test_a_table_has_a_row_for_a_template_without_an_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "endless.jinja").write_text("{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3)
    status, out, _ = run(capsys, "--table", tmp_path, "--timeout", 2)
    assert status == 0
    assert "/endless` | error | the audit took longer than 2 s" in out


@pytest.mark.parametrize("source", ["{{ raise_exception('never') }}", "{{ ''.__class__.__mro__[1] }}" + HEADS])
def test_a_template_that_refuses_everything_is_not_usable(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "refusing.jinja"
    file.write_text(source)
    status, out, _ = run(capsys, "--template", file, *FEW)
    assert status == 4
    assert "Not usable" in out


def test_no_code_of_a_models_folder_is_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "executed"
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Tokenizer: pass\n")
    auto_map = {"AutoTokenizer": ["evil.Tokenizer", None]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map, "tokenizer_class": "Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto_map}))
    status, _, err = run(capsys, tmp_path)
    assert status == 1
    assert "custom code" in err
    assert not mark.exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("/no/such/folder",), "must be a folder that exists"),
        (("{folder}",), "the folder has no config.json"),
        (("{model}", "--template", "no_such"), "--template must be a file, or one of the tokenizer's templates"),
        (("--template", "no_such.jinja"), "no_such.jinja cannot be read"),
        (("{bare}",), "no chat template"),
        (("{model}", "--parser", "no_such"), "parser must be one of"),
        (("{model}", "--html", "{model}"), "cannot be written"),
        (("--table", "no_such"), "--table must name folders or files that exist"),
    ],
)
def test_what_is_not_there_is_an_error_that_names_it(
    arguments: tuple[str, ...], expected: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = model_folder(tmp_path / "bare", None) if "{bare}" in arguments else ""
    places = {"folder": str(tmp_path), "model": str(model), "bare": str(bare)}
    status, _, err = run(capsys, *(argument.format(**places) for argument in arguments), *FEW)
    assert status == 1
    assert expected in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("model", "--conversations", "0"),
        ("model", "--option", "enable_thinking"),
        ("model", "--option", "a b=1"),
        ("model", "--output", "x.md"),
        ("model", "--timeout", "0"),
        ("model", "--timeout", "inf"),
        ("model", "--timeout", "nan"),
        ("--table", "x", "--option", "a=1"),
        ("--table", "x", "--parser", "none"),
        ("model", "--table", "x"),
        ("model", "--no-such-option"),
    ],
)
def test_wrong_usage_is_status_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        run(capsys, *arguments)
    assert raised.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_the_help_tells_the_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        run(capsys, "--help")
    assert raised.value.code == 0
    out = capsys.readouterr().out
    for line in ("0  fit", "3  partly fit", "4  not usable", "5  undecided", "1  an error", "2  wrong usage"):
        assert line in out


def test_a_model_whose_turns_no_id_ends_is_an_error_that_says_once_what_to_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_folder(tmp_path / "endless", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    (folder / "generation_config.json").unlink()
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token": None}))
    status, _, err = run(capsys, folder, *FEW)
    assert status == 1
    assert err.count("an id that ends a turn of any kind") == err.count("Pass the id that the model samples last") == 1


def test_a_table_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.jinja").write_text(templates.QWEN)
    status, out, err = run(capsys, "--table", tmp_path, "--output", tmp_path / "table.md", *FEW)
    assert status == 0
    assert "1 templates" in out
    assert "1/1" in err
    assert "/one` | append-only" in (tmp_path / "table.md").read_text("utf-8")


def test_the_command_line_is_there_before_anything_heavy_is_loaded() -> None:
    code = "import sys, unbroken.cli; print([m for m in ('torch', 'transformers', 'tokenizers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
