"""What `unbroken view` reads of a run's folder: while it is written, after a crash, and with damaged files."""

from __future__ import annotations

import json
import os
import resource
import socket
import time
from urllib.parse import quote

import pytest
from tokenizers import Tokenizer, decoders, models

from support.fake_renderer import END
from support.recorded import (
    make_forked,
    make_row,
    make_trajectory,
    make_turn,
    write_metrics,
    write_run,
    write_step,
)
from support.rollouts import play
from support.scripted_env import ScriptedEnv
from support.servers import server_tokenizer
from unbroken.engines.scripted import ScriptedEngine
from unbroken.errors import InvalidInputError
from unbroken.rendering.encoding.text_codec import TokenTexts
from unbroken.rollout.env import Rewrite
from unbroken.runs.records.files import summarize
from unbroken.runs.records.record import RecordedRow, make_record
from unbroken.viewer.resources import open_runs
from unbroken.viewer.sources.models import Tokenizers
from unbroken.viewer.sources.rollouts import check_record, describe_trajectory, find_forks, match_turns


def read_tree(folder):
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def test_every_path_of_a_run_is_read_and_nothing_is_written(tmp_path):
    before = read_tree(write_run(tmp_path))
    resources = open_runs([tmp_path])
    paths = list(resources.list_paths())
    assert paths[:4] == ["index", "run/0", "run/0/table", "run/0/step/0"]
    assert paths[-2:] == ["run/0/step/1/rollout/2", "run/0/step/1/rollout/2/retokenised"]
    for path in paths:
        assert resources.get(path)
    assert read_tree(tmp_path) == before
    run = resources.get("run/0")
    assert run["metrics"] == {"steps": [0, 1], "values": {"reward/mean": [0.0, 0.1]}}
    assert run["recorded_steps"] == [0, 1]
    assert run["evaluations"][0]["reward/mean"] == 0.5


def test_a_summary_says_what_can_be_chosen_by(tmp_path):
    summary = open_runs([write_run(tmp_path)]).get("run/0/step/1")
    plain, forked, failed = summary["trajectories"]
    assert (plain["num_sampled"], plain["advantage"], plain["versions"], plain["max_abs"]) == (3, 0.5, [3, 3], 0.125)
    assert (forked["forks"], forked["is_truncated"], forked["num_rows"]) == (["rewritten_history"], True, 2)
    assert (failed["status"], failed["reward"], failed["max_abs"]) == ("failed", None, None)


def test_files_with_and_without_columns_have_the_same_lines_and_texts_are_found_in_both(tmp_path):
    members = [make_trajectory("g0/0", [make_row([1, 2, 3], num_prompt=1)]), make_forked()]
    for number, head in enumerate(({}, {"num_rollouts": 9, "rewards": [2, 0.5, 0.5]})):
        write_step(tmp_path, number, members, **head)
        write_step(tmp_path, 7, members[:1], folder="evaluations/Größe 100%", set="Größe 100%")
    resources = open_runs([tmp_path])
    evaluated = "7@Gr%C3%B6%C3%9Fe%20100%25"

    def find(query):
        found = resources.get(f"run/0/table/{quote(query, safe='')}")
        assert (found["num_read"], found["num_steps"]) == (3, 3)
        return [(each["step"], each["index"]) for each in found["rows"]]

    assert resources.get("run/0")["recorded_steps"] == [0, 1, evaluated]
    table = json.loads(json.dumps(resources.get("run/0/table")))
    assert [{**each, "step": 0, "number": 0} for each in table["rows"][2:4]] == table["rows"][:2]
    first, second = (json.loads(json.dumps(resources.get(f"run/0/step/{n}")["trajectories"])) for n in (0, 1))
    assert first == [{**each, "line": each["line"] - 1, "versions": [3, 3]} for each in second]
    assert find("q=The+ANSWER+is") == [(0, 0), (1, 0), (evaluated, 0)]
    assert (find("q=b&size=1"), find("q=nowhere"), find("set=Größe+100%25")) == ([(0, 1)], [], [(evaluated, 0)])
    assert find("fork=rewritten_history&step=1..2") == find("is=truncated,forked&reward=..0.5&step=1") == [(1, 1)]
    assert find("sort=-reward&variance=1&mismatch=0.1..") == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert find("part=exact&value=1..1&status=completed&sort=part:exact&ids=2..2&set=training") == [(0, 0), (1, 0)]
    problem = table["rows"][1]["problem"]
    assert find(f"problem={problem}") == [(0, 1), (1, 1)]
    assert find("part=none&value=1") == find("status=failed") == []
    assert resources.get(f"run/0/step/{evaluated}/rollout/0")["set"] == "Größe 100%"
    write_step(tmp_path, 1, members[:1], num_rollouts=1)
    assert find("q=b") == [(0, 1)]


def test_a_rollout_whose_fork_left_one_row_is_forked(tmp_path):
    """As where the turn that was left has no loss, so its row is not trained."""
    forked = make_forked()
    members = [make_trajectory("g0/0", [make_row([1, 2, 3], num_prompt=1)]), {**forked, "rows": forked["rows"][1:]}]
    write_run(tmp_path)
    write_step(tmp_path, 5, members)
    found = open_runs([tmp_path]).get(f"run/0/table/{quote('is=forked&step=5', safe='')}")
    assert [each["index"] for each in found["rows"]] == [1]


def test_forks_have_their_reason_and_the_first_ids_that_differ():
    record = make_forked()
    turn_of_node = match_turns(record["rows"], record["turns"])
    assert turn_of_node == {1: 0, 3: 1}
    (fork,) = find_forks(record["rows"], record["turns"], turn_of_node)
    assert fork == {"row": 1, "parent_row": 0, "position": 1, "turn": 1, "reason": "rewritten_history", "ids": [2, 9]}


@pytest.mark.parametrize(
    ("ids", "num_prompt", "reason"),
    [([7, 8, 9, 6], 3, "new_conversation"), ([1, 2, 3, 5], 2, "sampled_again"), ([1, 9, 6], 2, "new_conversation")],
    ids=["a sub-agent", "sampled twice", "anew after the first id"],
)
def test_branches_without_a_fork_say_what_they_begin_with(ids, num_prompt, reason):
    record = make_forked()
    record["turns"][1]["fork"] = None
    record["rows"][1] = make_row(ids, num_prompt=num_prompt, node=2)
    (fork,) = find_forks(record["rows"], record["turns"], {1: 0, 3: 1})
    assert fork["reason"] == reason


async def test_a_real_rollout_that_forked_has_its_turns_and_its_reason():
    engine = ScriptedEngine([[7, END], [8, END]], allow_forks=True)
    member = await play(ScriptedEnv([Rewrite(messages=[{"role": "user", "content": "other"}])]), engine)
    recorded = [RecordedRow(path=path, row=row, trained=None, trainer_logprobs=None) for path, row in member.tree.rows]
    record = make_record("0-0-3", member, recorded)
    check_record(record)
    described = describe_trajectory(record, None)
    assert sorted(described["turn_of_node"].values()) == [0, 1]
    (fork,) = described["forks"]
    assert (fork["turn"], fork["reason"]) == (1, "rewritten_history")
    assert fork["ids"][0] != fork["ids"][1]


def test_turns_of_which_no_row_is_left_are_passed_over():
    rows = [make_row([1, 2, 3, 4, 5], num_prompt=2, node=4)]
    assert match_turns(rows, [{"num_sampled": 2}, {"num_sampled": 3}]) == {5: 1}
    assert match_turns(rows, [{"num_sampled": 2}, {"num_sampled": 7}]) == {}
    assert match_turns(rows, [{"num_sampled": 3}, {"num_sampled": 3}]) == {}
    assert match_turns([], [{"num_sampled": 3}]) == {}


def test_a_half_written_line_is_not_read_and_a_damaged_one_is_named(tmp_path):
    write_metrics(tmp_path, 2, end='{"step": 2, "rew')
    run = open_runs([tmp_path]).get("run/0")
    assert run["metrics"]["steps"] == [0, 1]
    assert run["problems"] == []
    write_metrics(tmp_path, 2, end="nothing\n")
    assert open_runs([tmp_path]).get("run/0")["problems"] == [
        "line 3 of metrics.jsonl is not a JSON object, and is left out"
    ]
    write_metrics(tmp_path, 2, end="0" * (2 << 20) + '\n{"step": 2}\n')
    run = open_runs([tmp_path]).get("run/0")
    assert run["metrics"]["steps"] == [0, 1]
    assert run["problems"] == ["line 3 of metrics.jsonl is too long, or the file: the rest is left out"]


def test_a_damaged_file_shows_what_comes_before_the_damage(tmp_path):
    write_run(tmp_path)
    path = tmp_path / "rollouts" / "step-00000001.rank-0.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-8])
    summary = open_runs([tmp_path]).get("run/0/step/1")
    assert "must be a file of rollouts" in summary["problems"][0]
    for each in summary["trajectories"]:
        assert (
            open_runs([tmp_path]).get(f"run/0/step/1/rollout/{each['index']}")["record"]["trajectory"]
            == each["trajectory"]
        )


def test_whichever_byte_of_a_file_is_damaged_its_step_is_shown_with_what_is_wrong(tmp_path):
    write_run(tmp_path)
    path = tmp_path / "rollouts" / "step-00000001.rank-0.jsonl.gz"
    whole = path.read_bytes()
    for position in range(10, len(whole), max(1, len(whole) // 200)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        assert len(open_runs([tmp_path]).get("run/0/step/1")["problems"]) == 1, position


def test_a_step_that_is_made_again_is_read_again(tmp_path):
    write_run(tmp_path)
    reader = open_runs([tmp_path])
    revision = reader.get("index")["runs"][0]["revision"]
    assert len(reader.get("run/0/step/0")["trajectories"]) == 1
    write_step(tmp_path, 0, [make_trajectory("g1/0", []), make_trajectory("g1/1", [])])
    assert len(reader.get("run/0/step/0")["trajectories"]) == 2
    assert reader.get("index")["runs"][0]["revision"] != revision


def test_files_of_all_processes_are_one_step(tmp_path):
    write_run(tmp_path)
    other = make_trajectory("g7/0", [make_row([7, 8], num_prompt=1)], reward_parts={"other": 0.5})
    write_step(tmp_path, 0, [other], rank=1)
    for rank, member in enumerate((make_trajectory("g0/0", []), other)):
        write_step(tmp_path, 2, [member], rank=rank, num_rollouts=1)
    reader = open_runs([tmp_path])
    found = reader.get("run/0/table/step=2")["rows"]
    assert [(each["trajectory"], each["part:exact"], each["part:other"]) for each in found] == [
        ("g0/0", 1.0, None),
        ("g7/0", None, 0.5),
    ]
    assert [each["trajectory"] for each in reader.get("run/0/table/part=other&value=0")["rows"]] == []
    assert len(reader.get("run/0/table/part=other&value=..1")["rows"]) == 2
    assert [each["trajectory"] for each in reader.get("run/0/step/0")["trajectories"]] == ["g0/0", "g7/0"]
    assert reader.get("run/0/step/0/rollout/1")["rank"] == 1


@pytest.mark.parametrize(
    ("lock", "state"),
    [
        (None, "ended"),
        (f"{os.getpid()} on {socket.gethostname()}\n", "running"),
        (f"4194304 on {socket.gethostname()}\n", "died"),
        ("4194304 on another-machine\n", "running"),
    ],
    ids=["no lock", "a process that runs", "a process that is gone", "another machine"],
)
def test_the_state_of_a_run_is_that_of_the_process_in_its_lock(tmp_path, lock, state):
    write_metrics(tmp_path, 1)
    if lock is not None:
        (tmp_path / "run.lock").write_text(lock)
    assert open_runs([tmp_path]).get("index")["runs"][0]["state"] == state


@pytest.mark.parametrize("path", ["", "run/1", "run/0/step/9", "run/0/step/1/rollout/3", "run/0/../index", "run/٠"])
def test_other_paths_are_unknown(tmp_path, path):
    with pytest.raises(LookupError):
        open_runs([write_run(tmp_path)]).get(path)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="RUN must be the output folder of a run"):
        open_runs([tmp_path])
    with pytest.raises(InvalidInputError, match="/nothing: there is no such folder"):
        open_runs([tmp_path / "nothing"])


@pytest.mark.parametrize("model", ["my--model", "..", "a.git", "x" * 97, "no-such/model"])
def test_a_model_of_any_name_may_have_no_tokenizer_here(model):
    tokenizers = Tokenizers(None, run=None)
    assert tokenizers.find([model]) is None
    assert tokenizers.find_template([model]) is None


def test_a_model_folder_that_is_a_link_is_followed_where_a_run_names_it(tmp_path):
    server_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "link").symlink_to(tmp_path / "model")
    (tmp_path / "run").mkdir()
    assert Tokenizers(None, run=tmp_path / "run").find([str(tmp_path / "link")]) is not None


def test_the_texts_of_byte_level_ids_keep_spaces_and_parts_of_characters():
    vocabulary = {"Ġthe": 0, "Ã": 1, "©": 2, "Ċ": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    texts = TokenTexts(tokenizer).get_all([0, 1, 2, 3, 4, 99])
    assert {each: text.text for each, text in texts.items()} == {0: " the", 1: "�", 2: "�", 3: "\n", 4: "<|end|>"}
    assert texts[1].data + texts[2].data == "é".encode()


def test_the_texts_of_sentence_pieces_keep_spaces_and_bytes():
    tokenizer = Tokenizer(models.BPE(vocab={"▁the": 0, "<0xC3>": 1}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    texts = TokenTexts(tokenizer).get_all([0, 1])
    assert (texts[0].text, texts[1].data) == (" the", b"\xc3")


def test_a_run_of_50_steps_with_128_rollouts_opens_in_2_s(tmp_path):
    write_metrics(tmp_path, 50)
    row = make_row(range(1200), num_prompt=200)
    members = [make_trajectory(f"g{n // 8}/{n % 8}", [row], reward=n / 128) for n in range(128)]
    first = write_step(tmp_path, 0, members)
    for step in range(1, 50):
        (first.parent / first.name.replace("00000000.", f"{step:08}.")).write_bytes(first.read_bytes())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    resources = open_runs([tmp_path])
    assert len(resources.get("run/0")["recorded_steps"]) == 50
    assert len(resources.get("run/0/step/49")["trajectories"]) == 128
    assert resources.get("run/0/step/49/rollout/127")["record"]["rows"][0]["token_ids"] == list(range(1200))
    assert time.process_time() - start < 2.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024


def test_a_problem_is_the_row_of_the_data_set_or_what_stands_before_the_first_answer():
    data = {"index": 3, "columns": {"question": "2 + 2", "answer": "4"}}
    examples = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    question = {"role": "user", "content": "2 + 2"}

    def identify(answer, *, before=(question,), data=None):
        message = {"role": "assistant", "content": answer}
        turns = [make_turn(1, message)]
        record = make_trajectory("g0/0", [], messages=[*before, message], turns=turns, data=data)
        return summarize(record)["problem"], summarize(record)["prompt"]

    (same, prompt), (other, _) = identify("4"), identify("5")
    assert (same, prompt) == (other, "2 + 2")
    assert identify("4", before=[*examples, question]) == (identify("7", before=[*examples, question])[0], "2 + 2")
    assert identify("4", before=[*examples, question])[0] != same
    changed = {"index": 9, "columns": data["columns"]}
    assert identify("4", data=data)[0] == identify("4", before=examples[:1], data=changed)[0] != same
