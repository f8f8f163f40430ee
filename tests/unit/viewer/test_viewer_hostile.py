"""`unbroken view` on a folder of another person: nothing outside it is read, what is broken is shown as that."""

from __future__ import annotations

import copy
import gzip
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from support.recorded import make_rich, make_row, make_trajectory, write_run, write_step
from support.recorded_sessions import write_store
from support.servers import server_tokenizer
from unbroken.errors import InvalidInputError, StoreError
from unbroken.limited_process import ProcessLimits
from unbroken.runs.records.files import make_first_lines, parse_line
from unbroken.viewer.resources import open_runs
from unbroken.viewer.server import export_page
from unbroken.viewer.sources.models import Tokenizers
from unbroken.viewer.sources.rollouts import check_record, describe_trajectory, read_trajectory, summarize

SECRET = "7" * 40
IMAGE = "0" * 64
LINKED = {
    "an image": f"rollouts/images/{IMAGE}",
    "the images": "rollouts/images",
    "a step": "rollouts/step-00000001.rank-0.jsonl.gz",
    "the rollouts": "rollouts",
    "the metrics": "metrics/metrics.jsonl",
    "the folder of the metrics": "metrics",
    "the recipe": "recipe.json",
    "the evaluations": "evaluation.jsonl",
    "a tokenizer": "final/tokenizer.json",
    "a template": "final/chat_template.jinja",
    "a model": "final",
    "a set": "evaluations/math",
    "a set's step": "evaluations/math/step-00000001.rank-0.jsonl.gz",
    "all sets": "evaluations",
}


def write_secrets(folder: Path) -> Path:
    """A run of the victim's, all of whose files have the secret."""
    message = {"role": "user", "content": SECRET}
    write_step(folder, 1, [make_trajectory("g0/0", [], messages=[message], turns=[], error=SECRET)])
    write_step(folder, 1, [make_trajectory(SECRET, [])], folder="evaluations/math", set=SECRET)
    (folder / "rollouts" / "images").mkdir()
    (folder / "rollouts" / "images" / IMAGE).write_text(SECRET)
    (folder / "metrics").mkdir()
    (folder / "metrics" / "metrics.jsonl").write_text(f'{{"step": 0, "{SECRET}": 1}}\n')
    (folder / "evaluation.jsonl").write_text(f'{{"step": 0, "set": "{SECRET}"}}\n')
    (folder / "recipe.json").write_text(json.dumps({"recipe": SECRET}))
    tokenizer = copy.deepcopy(server_tokenizer())
    tokenizer.add_tokens([SECRET])
    tokenizer.chat_template = SECRET
    tokenizer.save_pretrained(folder / "final")
    return folder


@pytest.mark.parametrize("name", LINKED)
def test_no_link_of_a_run_is_followed_nor_its_target_exported(tmp_path: Path, name: str) -> None:
    secrets, run = write_secrets(tmp_path / "home"), write_run(tmp_path / "run")
    link = run / LINKED[name]
    if link.exists():
        link.rename(tmp_path / "moved")
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(secrets / LINKED[name])
    if link.parent.name == "final":
        for file in (secrets / "final").iterdir():
            (link.parent / file.name).exists() or (link.parent / file.name).write_bytes(
                file.read_bytes().replace(b"7", b"8")
            )
    export_page(open_runs([run]), tmp_path / "page")
    written = [file for file in (tmp_path / "page").rglob("*") if file.is_file()]
    assert len(written) > 15
    assert not [file for file in written if SECRET.encode() in file.read_bytes()]


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    for name in ("metrics/metrics.jsonl", "evaluation.jsonl", "recipe.json", "run.lock", f"rollouts/images/{IMAGE}"):
        (run / name).unlink(missing_ok=True)
        (run / name).parent.mkdir(exist_ok=True)
        os.mkfifo(run / name)
    resources = open_runs([run])
    assert resources.get("run/0")["metrics"]["steps"] == []
    with pytest.raises(LookupError):
        resources.get_image(f"run/0/image/{IMAGE}")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (b"\x00" * (8 << 20), "67108864 bytes"),
        (b"{}\n" * (1 << 20), "more than 1000 broken lines"),
        (json.dumps(make_trajectory("x", [])).encode() + b" " * 99_999 + b"\n", "bytes in all"),
    ],
    ids=["one line", "many lines", "a file"],
)
def test_a_file_that_unpacks_to_far_more_than_it_is_is_read_up_to_a_limit(
    tmp_path: Path, part: bytes, words: str
) -> None:
    """1.4 MB of rollouts unpacked to 1.9 GB."""
    run = write_run(tmp_path)
    path = run / "rollouts" / "step-00000001.rank-0.jsonl.gz"
    packed = gzip.compress(part * max(1, (8 << 20) // len(part)))
    path.write_bytes(path.read_bytes() + packed * 20)
    begin = time.process_time()
    summary = open_runs([run]).get("run/0/step/1")
    assert time.process_time() - begin < 20
    assert words in summary["problems"][0]
    assert [each["trajectory"] for each in summary["trajectories"][:3]] == ["g0/0", "g0/1", "g0/2"]
    assert open_runs([run]).get("run/0/step/1/rollout/0")["record"]["status"] == "completed"
    assert open_runs([run]).get("run/0/step/0")["problems"] == []


BROKEN = {
    "deep JSON": b'{"kind": "trajectory", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "JSON a little too deep": b'{"kind": "trajectory", "messages": ' + b"[" * 200 + b"]" * 200 + b"}",
    "no JSON": b"{{{",
    "no object": b"[1, 2]",
    "other bytes": b"\xff\xfe\x00",
    "a number that is not finite": json.dumps(make_trajectory("x", [], reward=1e999)).encode(),
    "a number beyond float64": json.dumps(make_trajectory("x", [], reward=10**400)).encode(),
    "an empty object": b"{}",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_record_is_shown_as_broken_and_the_others_as_they_are(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path)
    path = run / "rollouts" / "step-00000001.rank-0.jsonl.gz"
    lines = gzip.decompress(path.read_bytes()).splitlines()
    path.write_bytes(gzip.compress(b"\n".join([*lines[:2], BROKEN[name], *lines[2:]]) + b"\n"))
    resources = open_runs([run])
    shown = [resources.get(f"run/0/step/1/rollout/{n}")["record"] for n in range(4)]
    assert [each["status"] for each in shown] == ["completed", "broken", "completed", "failed"]
    assert [each["status"] for each in resources.get("run/0/step/1")["trajectories"]] == [
        each["status"] for each in shown
    ]
    assert shown[1]["error"].startswith("the record cannot be read: ")
    for path_of_object in resources.list_paths():
        json.dumps(resources.get(path_of_object), allow_nan=False)


def list_places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, item in items:
        yield from list_places(item, (*place, key))


def test_whatever_stands_in_the_place_of_a_field_the_record_is_shown_or_is_broken() -> None:
    record = make_rich()
    check_record(record)
    num_broken = 0
    for place in list(list_places(record))[1:]:
        for value in (None, True, -1, 2**70, 1e300, "x", [], [[]], {}, {"x": 1}, [None], [-1, 2**40, 3]):
            changed = copy.deepcopy(record)
            inner = changed
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = value
            read = read_trajectory(json.dumps(changed).encode(), 1)
            num_broken += read["status"] == "broken"
            json.dumps([summarize(read), describe_trajectory(read, None)], allow_nan=False)
    assert num_broken > 500


def test_spans_that_leave_the_ids_and_too_many_branches_are_broken() -> None:
    for row in (
        make_row([1, 2, 3], num_prompt=1) | {"loss": [[0, 10**15]]},
        make_row([1, 2, 3], num_prompt=1) | {"images": [{"start": 2, "stop": 1, "sha256": IMAGE}]},
        make_row([1, 2**31, 3], num_prompt=1),
    ):
        with pytest.raises(InvalidInputError, match=r"rows\.0"):
            check_record(make_trajectory("g", [row]))
    with pytest.raises(InvalidInputError, match="at most 1000"):
        check_record(make_trajectory("g", [make_row([1, 2], num_prompt=1)] * 1001))


@pytest.mark.parametrize("wrong", [{"reward": ["1"]}, {"forks": [[1]]}, {"status": [None]}, {"parts": {"a": [[1]]}}])
def test_columns_of_another_form_are_named_and_no_line_is_shown(tmp_path: Path, wrong: dict[str, Any]) -> None:
    members = [make_trajectory("g0/0", [], messages=[{"role": "user", "content": "one"}])]
    right, texts = make_first_lines({}, [summarize(members[0])] * 2)
    columns = make_first_lines({}, [summarize(members[0])])[0]["columns"]
    write_step(tmp_path, 0, members, columns=columns | wrong)
    write_step(tmp_path, 1, [texts, *members], **right)
    write_step(tmp_path, 2, members, columns=columns | {"status": ["a", "b"]})
    write_step(tmp_path, 3, [texts, *members], columns=columns)
    resources = open_runs([tmp_path])
    table = resources.get("run/0/table/q=ONE")
    assert [(each["step"], each["index"]) for each in table["rows"]] == [(1, 0), (1, 1), (3, 0)]
    assert f"line 0: columns.{next(iter(wrong))}." in table["problems"][0]
    assert "columns must have the same length" in table["problems"][1]
    assert "line 1: it must have 1 texts, got 2" in resources.get("run/0/step/3")["problems"][0]
    assert resources.get("run/0/step/1/rollout/0")["record"]["trajectory"] == "g0/0"
    with pytest.raises(InvalidInputError, match="has no line 3"):
        resources.get("run/0/step/1/rollout/1")


def test_numbers_and_a_recipe_of_other_forms_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    deep = "[" * 50_000
    with (run / "metrics" / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 2, "x": {deep}\n{{"step": 3, "reward/mean": NaN}}\n{{"step": 1e999}}\n')
    (run / "evaluation.jsonl").write_text('{"step": 0, "set": [1], "x": {"y": 1}, "z": 2}\n')
    (run / "recipe.json").write_text('{"settings": ' + deep)
    (run / "run.lock").write_text(f"{'9' * 5000} on {os.uname().nodename}")
    shown = open_runs([run]).get("run/0")
    assert shown["metrics"]["steps"] == [0, 1]
    assert len(shown["problems"]) == 3
    assert shown["evaluations"] == [{"step": 0, "z": 2}]
    assert (shown["model"], shown["recipe"]) == (None, None)


@pytest.mark.e2e
def test_a_template_without_an_end_is_stopped_and_the_next_rollout_is_compared(tmp_path: Path) -> None:
    """It ran in the viewer's own process."""
    run = write_run(tmp_path / "run")
    tokenizer = copy.deepcopy(server_tokenizer())
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer.chat_template = f"{{% if messages[0].content == 'loop' %}}{loops}{{% endif %}}{tokenizer.chat_template}"
    tokenizer.save_pretrained(run / "final")
    looping = [{"role": "user", "content": "loop"}, {"role": "assistant", "content": "The answer is 4."}]
    row = make_row([1, 2, 3], num_prompt=2)
    write_step(run, 5, [make_trajectory("g0/0", [row], messages=looping), make_trajectory("g0/1", [row])])
    patient, strict = (open_runs([run], limits=ProcessLimits(timeout_s=limit)) for limit in (90, 2))
    assert "changes" in patient.get("run/0/step/5/rollout/1/retokenised")["rows"][0]
    stopped = strict.get("run/0/step/5/rollout/0/retokenised")
    assert stopped["problem"].startswith("retokenising took longer than 2 s and was stopped")
    assert "changes" in patient.get("run/0/step/5/rollout/1/retokenised")["rows"][0]


@pytest.mark.parametrize("model", ["x\x00y", "x" * 5000, "../..", "/dev", "/proc/self/fd"])
def test_a_run_may_name_any_model(tmp_path: Path, model: str) -> None:
    assert Tokenizers(None, run=tmp_path).find([model]) is None
    assert Tokenizers(None, run=tmp_path).find_template([model]) is None


async def test_a_broken_session_of_a_store_is_shown_as_broken_and_the_others_as_they_are(tmp_path: Path) -> None:
    await write_store(tmp_path)
    for column, value in (
        ("settings", '{"metadata": ' + "[" * 500 + "]" * 500 + "}"),
        ("settings", "[" * 100_000),
        ("outcome", '"x"'),
        ("key_digest", b"short"),
        ("status", "unheard of"),
    ):
        with closing(sqlite3.connect(tmp_path / "sessions.sqlite3")) as database, database:
            (before,) = database.execute(f"SELECT {column} FROM sessions WHERE session = 2").fetchone()
            database.execute(f"UPDATE sessions SET {column} = ? WHERE session = 2", (value,))
        resources = open_runs([tmp_path])
        lines = resources.get("run/0/step/0")["trajectories"]
        assert [each["status"] for each in lines] == ["completed", "broken"], column
        shown = resources.get("run/0/step/0/rollout/1")
        assert (shown["record"]["status"], shown["session"]["status"]) == ("broken", "broken")
        for path in resources.list_paths():
            json.dumps(resources.get(path), allow_nan=False)
        with closing(sqlite3.connect(tmp_path / "sessions.sqlite3")) as database, database:
            database.execute(f"UPDATE sessions SET {column} = ? WHERE session = 2", (before,))


async def test_a_store_that_computes_or_has_links_is_refused(tmp_path: Path) -> None:
    await write_store(tmp_path / "store")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "sessions.sqlite3").symlink_to(tmp_path / "store" / "sessions.sqlite3")
    with pytest.raises(InvalidInputError, match="is a link"):
        open_runs([tmp_path / "links"])
    with closing(sqlite3.connect(tmp_path / "store" / "sessions.sqlite3")) as database, database:
        database.execute("ALTER TABLE sessions RENAME TO hidden")
        database.execute("CREATE VIEW sessions AS SELECT * FROM hidden")
    with pytest.raises(StoreError, match="must have tables only, which gateways make, but 'sessions' is computed"):
        open_runs([tmp_path / "store"]).get("run/0")


def test_a_line_must_be_an_object() -> None:
    with pytest.raises(InvalidInputError, match="it must be a JSON object"):
        parse_line(b"3")
