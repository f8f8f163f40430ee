"""Prompts from files: every row once in each epoch, and what is wrong with a data set is said at once."""

from __future__ import annotations

import base64
import csv
import datetime
import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from support.effort import num_cases
from unbroken.errors import InvalidInputError, MessagesError
from unbroken.runs.prompts.dataset import DataConfig, Rows

MESSAGES = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2", "reasoning_content": "hm"}]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The library's cache, which is else in the user's home."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def jsonl(folder: Path, *rows: Any) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def numbered(folder: Path, n: int = 5) -> Path:
    return jsonl(folder, *({"prompt": f"{k}?", "answer": k} for k in range(n)))


def order(file: Path, *, seed: int, shuffle: bool = True) -> list[int]:
    rows = Rows(DataConfig(file=file, shuffle=shuffle), seed=seed)
    return [rows.row(number)["answer"] for number in range(15)]


def test_each_epoch_has_every_row_once_in_an_order_that_follows_from_the_seed(tmp_path):
    file = numbered(tmp_path)
    found = order(file, seed=0)
    assert [sorted(found[k : k + 5]) for k in (0, 5, 10)] == [[0, 1, 2, 3, 4]] * 3
    assert len({tuple(found[k : k + 5]) for k in (0, 5, 10)}) > 1
    assert order(file, seed=0) == found
    assert order(file, seed=1) != found
    assert order(file, seed=1, shuffle=False) == [0, 1, 2, 3, 4] * 3


def test_parquet_is_read_as_jsonl_is(tmp_path):
    file = numbered(tmp_path)
    datasets.load_dataset("json", data_files=str(file), split="train").to_parquet(tmp_path / "prompts.parquet")
    assert order(tmp_path / "prompts.parquet", seed=3) == order(file, seed=3)


def test_a_prompt_may_be_messages_and_a_text_may_have_a_system_message(tmp_path):
    rows = Rows(DataConfig(file=jsonl(tmp_path, {"prompt": MESSAGES})), seed=0)
    assert rows.messages(0) == MESSAGES
    rows = Rows(DataConfig(file=jsonl(tmp_path, {"q": "1?"}), prompt="q", system="Be brief."), seed=0)
    assert rows.messages(0) == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1?"}]
    assert rows.row(0)[rows.prompt_column] == "1?"


def test_keys_that_a_message_does_not_have_are_not_made_up(tmp_path):
    """Parquet has all keys of a column's messages in each of them, with None where there was none."""
    file = tmp_path / "prompts.parquet"
    every_key = [{"reasoning_content": None, **message} for message in MESSAGES]
    datasets.Dataset.from_list([{"prompt": every_key}]).to_parquet(file)
    rows = Rows(DataConfig(file=file), seed=0)
    assert rows.row(0)["prompt"] == MESSAGES
    assert rows.messages(0) == MESSAGES


def test_rows_may_name_the_tools_that_they_are_offered(tmp_path):
    file = jsonl(tmp_path, {"prompt": "1?", "uses": ["add"]}, {"prompt": "2?", "uses": []})
    rows = Rows(DataConfig(file=file, tools="uses", shuffle=False), seed=0)
    rows.check_tools(["add", "search"])
    assert [rows.tools(number) for number in range(3)] == [["add"], [], ["add"]]
    assert Rows(DataConfig(file=file), seed=0).tools(0) is None
    with pytest.raises(
        InvalidInputError, match=r"row 0, column 'uses' must be a list of names of tools, got \['add'\]"
    ):
        rows.check_tools(["search"])


def test_schemas_of_tools_in_the_place_of_their_names_are_an_error_with_the_row(tmp_path):
    file = jsonl(tmp_path, {"prompt": "1?", "uses": [{"type": "function", "name": "add"}]})
    rows = Rows(DataConfig(file=file, tools="uses"), seed=0)
    with pytest.raises(InvalidInputError, match=r"row 0, column 'uses' must be a list of names of tools, got .*func"):
        rows.check_tools(["add"])


def test_the_source_tells_data_sets_apart(tmp_path):
    sources = {Rows(DataConfig(file=numbered(tmp_path, n)), seed=0).source for n in (3, 4)}
    assert sources == {
        Rows(DataConfig(file=numbered(tmp_path, 3), split="train[:3]"), seed=1).source,
        Rows(DataConfig(file=numbered(tmp_path, 5), split="train[:4]"), seed=1).source,
    }


def test_the_source_tells_every_column_apart_and_says_which_differ(tmp_path):
    def find(*rows: dict[str, Any]) -> str:
        return Rows(DataConfig(file=jsonl(tmp_path, *rows)), seed=0).source

    row = {"prompt": "1?", "answer": 1, "info": {"tests": ["a"]}}
    first, again = find(row), find(dict(reversed(row.items())))
    assert first == again
    prompts, _, columns = first.partition(" and the other columns ")
    assert not find(row | {"prompt": "2?"}).startswith(prompts)
    assert find(row | {"prompt": "2?"}).endswith(columns)
    others = [row | {"answer": 2}, row | {"info": {"tests": ["b"]}}, {"prompt": "1?", "right": 1}, {"prompt": "1?"}]
    found = [find(other).partition(" and the other columns ") for other in others]
    assert {each[0] for each in found} == {prompts}
    assert len({columns, *(each[2] for each in found)}) == 5


def test_the_source_is_the_same_in_another_process_and_from_another_folder(tmp_path):
    """Bytes are known by their contents, and files of media by their names."""
    script = (
        "import sys, datasets; from pathlib import Path; datasets.config.HF_DATASETS_CACHE = Path(sys.argv[2])\n"
        "from unbroken.runs.prompts.dataset import DataConfig, Rows\n"
        "print(Rows(DataConfig(file=Path(sys.argv[1])), seed=0).source)"
    )
    found = set()
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        columns = {"prompt": ["1?"], "raw": [b"\x00\xff"], "when": [datetime.datetime(2026, 1, 1)]}
        picture = {"bytes": None, "path": str(folder / "a.png")}  # as `imagefolder` of `datasets` has it
        pq.write_table(pa.table({**columns, "picture": [picture]}), folder / "p.parquet")
        words = [sys.executable, "-c", script, str(folder / "p.parquet"), str(folder / "cache")]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        found.add(subprocess.run(words, capture_output=True, text=True, env=environment, check=True).stdout)
    assert len(found) == 1


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            [{"question": "1?", "answer": 1}],
            {},
            r"must have the column 'prompt', which .* columns are question, answer",
        ),
        ([], {}, r"prompts.jsonl must have at least one row, but the file is empty"),
        ([{"prompt": "1?"}], {"split": "train[:0]"}, r"prompts.jsonl cannot be loaded: .* no data"),
        ([{"prompt": "1?"}], {"split": "test"}, r"prompts.jsonl cannot be loaded: Unknown split \"test\""),
        (
            [{"prompt": "1?"}, {"prompt": " "}],
            {},
            r"prompts.jsonl, row 1, column 'prompt' must be text or messages, got ' '",
        ),
        ([{"prompt": "1?"}], {"tools": "uses"}, r"must have the column 'uses', which tools names"),
        ([{"prompt": 3}], {}, r"row 0, column 'prompt' must be text or messages, got 3"),
        ([{"prompt": ["a", "b"]}], {}, r"row 0, .* a list of messages, .* role and content: messages\[0\] is 'a'"),
        ([{"prompt": []}], {}, r"row 0, column 'prompt' must be text or messages: messages must hold at least one"),
        ([{"prompt": [{"role": "tool", "content": "x"}]}], {}, r"row 0, .*: messages\[0\].role must not be 'tool'"),
    ],
)
def test_a_data_set_that_cannot_be_trained_on_is_refused(tmp_path, rows, options, message):
    with pytest.raises((InvalidInputError, MessagesError), match=message):
        Rows(DataConfig(file=jsonl(tmp_path, *rows), **options), seed=0)


def test_a_file_without_rows_is_refused(tmp_path):
    file = tmp_path / "none.parquet"
    datasets.Dataset.from_dict({"prompt": []}).to_parquet(file)
    with pytest.raises(InvalidInputError, match=r"none.parquet cannot be loaded: .* no data"):
        Rows(DataConfig(file=file), seed=0)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "1?"}\n{"prompt"\n')
    with pytest.raises(InvalidInputError, match=r"the data set .*broken.jsonl cannot be loaded: "):
        Rows(DataConfig(file=broken), seed=0)
    with pytest.raises(InvalidInputError, match=r"nowhere.jsonl cannot be loaded: there is no such file"):
        Rows(DataConfig(file=tmp_path / "nowhere.jsonl"), seed=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"exactly one of file and hub must be given"),
        ({"file": Path("a.jsonl"), "hub": "a/b"}, r"exactly one of file and hub must be given"),
        ({"file": Path("a.txt")}, r".jsonl, .json, .parquet, .csv, each also with .gz, or a folder .*, got a.txt"),
        ({"file": ()}, r"file must be one of .*, got an empty list"),
        ({"file": (Path("a.csv"), Path("b.jsonl"))}, r"file must be a list of files in one format, .*a.csv, b.jsonl"),
        ({"file": (Path(__file__).parent,) * 2}, r"file must be a list of files in one format, or a single folder"),
    ],
)
def test_what_names_no_data_set_is_refused(options, message):
    with pytest.raises(InvalidInputError, match=message):
        DataConfig(**options)


def test_a_hub_that_cannot_be_reached_is_an_error_that_says_so():
    with pytest.raises(InvalidInputError, match=r"the data set nobody/nothing-of-this-name cannot be loaded: "):
        Rows(DataConfig(hub="nobody/nothing-of-this-name"), seed=0)


def call(name: str, arguments: dict[str, Any], *parts: Any) -> list[dict[str, Any]]:
    """A prompt with a call; all contents are parts, because a Parquet column has no texts among lists."""
    function = {"name": name, "arguments": arguments}
    return [
        {"role": "user", "content": [{"type": "text", "text": "q"}, *parts]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "5"}]},
    ]


def png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4)).save(buffer, "PNG")
    return buffer.getvalue()


def arrow_type(values: list[Any]) -> Any:
    """The type that Arrow infers for JSON values: objects become structs with the keys of all of them."""
    kept = [value for value in values if value is not None]
    if kept and isinstance(kept[0], dict):
        keys = dict.fromkeys(key for value in kept for key in value)
        return pa.struct([(key, arrow_type([value.get(key) for value in kept])) for key in keys])
    if kept and isinstance(kept[0], list):
        return pa.list_(arrow_type([inner for value in kept for inner in value]))
    return pa.array(kept).type


def write(file: Path, prompts: list[Any], **columns: list[Any]) -> Path | tuple[Path, ...]:
    """Write rows in the form that the name says, and return the file, or the files."""
    cells = {"prompt": prompts, **columns}
    rows = [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    table = pa.table({name: pa.array(values, type=arrow_type(values)) for name, values in cells.items()})
    match file.suffix:
        case ".parquet":
            pq.write_table(table, file)
        case ".json":
            file.write_text(json.dumps(rows))
        case ".csv":
            with file.open("w", newline="") as lines:
                texts = ([json.dumps(cell) for cell in row.values()] for row in rows)
                csv.writer(lines).writerows([list(cells), *texts])
        case ".gz":
            file.write_bytes(gzip.compress(text.encode()))
        case ".saved":
            datasets.Dataset(table).save_to_disk(file)
        case ".splits":
            datasets.DatasetDict(train=datasets.Dataset(table), test=datasets.Dataset(table)).save_to_disk(file)
        case ".list":
            parts = file.with_suffix(".0.parquet"), file.with_suffix(".1.parquet")
            for part, rows_of_part in zip(parts, (table.slice(0, 1), table.slice(1)), strict=True):
                pq.write_table(rows_of_part, part)
            return parts
        case ".lines":
            parts = file.with_suffix(".0.jsonl"), file.with_suffix(".1.jsonl.gz")
            first, _, rest = text.partition("\n")
            parts[0].write_text(first + "\n")
            parts[1].write_bytes(gzip.compress(rest.encode()))
            return parts
        case _:
            file.write_text(text)
    return file


FORMS = ("p.jsonl", "p.json", "p.parquet", "p.csv", "p.jsonl.gz", "p.saved", "p.splits", "p.list", "p.lines")
KEYS = st.sampled_from(["a", "b", "city"])
ARGUMENTS = st.dictionaries(KEYS, st.integers(0, 9)) | st.fixed_dictionaries(
    {"query": st.fixed_dictionaries({}, optional={"x": st.text("xyz"), "y": st.lists(st.integers(0, 9), max_size=2)})}
)


@settings(max_examples=num_cases(10), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.lists(ARGUMENTS, min_size=1, max_size=3))
def test_a_prompt_with_calls_is_the_same_from_every_file_format(tmp_path_factory, drawn):
    # Arrow cannot write an object that has no key in any row, so one call has them all.
    full = {"a": 1, "b": 2, "city": 3, "query": {"x": "x", "y": [1]}}
    prompts = [call("f", arguments) for arguments in [*drawn, full]]
    folder = tmp_path_factory.mktemp("formats")
    for form in FORMS:
        rows = Rows(DataConfig(file=write(folder / form, prompts), shuffle=False), seed=0)
        assert [rows.messages(number) for number in range(len(prompts))] == prompts, form
        assert [rows.row(number)["prompt"] for number in range(len(prompts))] == prompts, form


def schema(**properties: Any) -> dict[str, Any]:
    """A tool's schema."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("p.csv", "p.lines")])
def test_schemas_and_calls_in_other_columns_have_no_keys_that_only_other_rows_have(tmp_path, form):
    # Not of CSV, whose other columns are text, nor of JSON lines in two files, which must have the same types.
    city, number = {"type": "string", "enum": ["Rome"]}, {"type": "integer", "minimum": 0}
    schemas = [[schema(city=city)], [schema(a=number, city=city)]]
    calls = [[{"name": "f", "arguments": {"city": "Rome"}}], [{"name": "f", "arguments": {"a": 1}}]]
    replies = [[{"role": "assistant", "content": None, "tool_calls": each}] for each in calls]
    columns = {"tools": schemas, "info": [{"expected": each} for each in calls], "replies": replies}
    file = write(tmp_path / form, ["1?", "2?"], **columns)
    rows = Rows(DataConfig(file=file, shuffle=False), seed=0)
    assert [rows.row(number) for number in range(2)] == [
        {"prompt": f"{k + 1}?", **{name: cells[k] for name, cells in columns.items()}} for k in range(2)
    ]


def test_a_tool_has_no_keys_that_only_tools_of_the_first_file_have(tmp_path):
    both, one = schema(a={"type": "integer"}, city={"type": "string"}), schema(city={"type": "string"})
    files = (tmp_path / "0.jsonl", tmp_path / "1.jsonl")
    for file, tool in zip(files, (both, one), strict=True):
        write(file, ["1?"], tools=[tool])
    rows = Rows(DataConfig(file=files, shuffle=False), seed=0)
    assert [rows.row(number)["tools"] for number in range(2)] == [both, one]


def test_a_null_of_another_object_in_another_column_stays_for_the_users_function(tmp_path):
    file = write(tmp_path / "p.parquet", ["1?", "2?"], info=[{"answer": None, "k": 1}, {"answer": "2", "k": 2}])
    assert Rows(DataConfig(file=file, shuffle=False), seed=0).row(0)["info"] == {"answer": None, "k": 1}


@pytest.mark.parametrize("form", ["p.parquet", "p.saved", "p.splits", "p.list"])
def test_a_part_of_a_split_is_the_same_from_every_form(tmp_path, form):
    file = write(tmp_path / form, [f"{k}?" for k in range(5)])
    for split, found in (("train[1:4]", [1, 2, 3]), ("train[:1]+train[4:]", [0, 4]), ("train[:40%]", [0, 1])):
        rows = Rows(DataConfig(file=file, split=split, shuffle=False), seed=0)
        assert [rows.row(number)["prompt"] for number in range(len(rows))] == [f"{k}?" for k in found]
    for split, message in (("validation", 'Unknown split "validation"'), ("train[:0]", "no data")):
        with pytest.raises(InvalidInputError, match=f"cannot be loaded: .*{message}"):
            Rows(DataConfig(file=file, split=split), seed=0)


def test_a_saved_data_set_has_its_splits_and_no_format(tmp_path):
    texts = {name: datasets.Dataset.from_dict({"prompt": [name], "n": [1]}) for name in ("train", "test")}
    datasets.DatasetDict(texts).with_format("numpy").save_to_disk(tmp_path / "data")
    for split in ("train", "test"):
        row = Rows(DataConfig(file=tmp_path / "data", split=split), seed=0).row(0)
        assert (row["prompt"], type(row["n"])) == (split, int)


def test_a_folder_that_is_no_data_set_is_refused(tmp_path):
    with pytest.raises(InvalidInputError, match=r"cannot be loaded: .*neither a `Dataset` directory"):
        Rows(DataConfig(file=tmp_path), seed=0)


def test_paths_of_images_are_relative_to_the_folder_with_all_files(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "dot.png").write_bytes(png())
    files = tuple(jsonl(tmp_path / name, {"prompt": name, "image": "b/dot.png"}) for name in ("a", "b"))
    rows = Rows(DataConfig(file=files, images="image", shuffle=False), seed=0)
    assert [rows.messages(number)[0]["content"][0]["image"] for number in range(2)] == [tmp_path / "b/dot.png"] * 2


def test_keys_of_other_rows_parts_are_not_filled_into_a_part(tmp_path):
    """An image's `detail`, which one part has, is deeper in a part than its own keys."""
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    prompts = [
        call("f", {"a": 1}, {"type": "image_url", "image_url": {"url": url, **detail}})
        for detail in ({}, {"detail": "low"})
    ]
    found = {
        form: Rows(DataConfig(file=write(tmp_path / form, prompts), shuffle=False), seed=0).row(0)["prompt"]
        for form in FORMS
    }
    assert list(found.values()) == [prompts[0]] * len(FORMS)


def test_a_null_that_the_author_of_a_call_wrote_stays_in_json_lines(tmp_path):
    prompts = [call("f", {"a": None}), call("f", {"a": 1})]
    for form in ("p.jsonl", "p.json", "p.jsonl.gz"):
        rows = Rows(DataConfig(file=write(tmp_path / form, prompts), shuffle=False), seed=0)
        assert rows.messages(0) == prompts[0], form


@pytest.mark.parametrize("name", ["p.csv.gz", "p.csv"])
def test_a_compressed_csv_is_read_as_a_plain_one(tmp_path, name):
    content = b"prompt,answer\n1?,1\n2?,2\n"
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    rows = Rows(DataConfig(file=tmp_path / name, shuffle=False), seed=0)
    assert [dict(rows.row(number)) for number in range(2)] == [
        {"prompt": "1?", "answer": 1},
        {"prompt": "2?", "answer": 2},
    ]


@pytest.mark.parametrize("name", ["p.jsonl", "p.csv", "p.parquet"])
def test_messages_as_json_text_are_messages(tmp_path, name):
    texts = [json.dumps(MESSAGES), '["a", "b"]', "[1] and [2]", '[{"x": 1}]']
    data = datasets.Dataset.from_dict({"prompt": texts})
    {"p.jsonl": data.to_json, "p.csv": data.to_csv, "p.parquet": data.to_parquet}[name](tmp_path / name)
    rows = Rows(DataConfig(file=tmp_path / name, shuffle=False, system="Be brief."), seed=0)
    assert rows.messages(0) == MESSAGES
    assert rows.row(0)["prompt"] == MESSAGES
    assert [rows.messages(number)[1]["content"] for number in (1, 2, 3)] == texts[1:]


def test_null_in_the_column_of_tools_means_none(tmp_path):
    file = jsonl(tmp_path, {"prompt": "1?", "uses": ["add"]}, {"prompt": "2?", "uses": None})
    rows = Rows(DataConfig(file=file, tools="uses", shuffle=False), seed=0)
    rows.check_tools(["add"])
    assert [rows.tools(number) for number in range(2)] == [["add"], []]
