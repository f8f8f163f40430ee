"""One report, shown as text, JSON, page and table."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support import templates
from support.audits import COUNTS_ITS_TURN, subject_of
from support.pages import Page
from unbroken.audit.config import AuditConfig, AuditTarget
from unbroken.audit.output import make_report, to_html
from unbroken.audit.report import JSON_VERSION, AuditReport, Verdict
from unbroken.audit.run import find_verdict, run_audit
from unbroken.audit.stand_in import make_stand_in
from unbroken.audit.subject import load_subject
from unbroken.audit.table import find_templates, make_table
from unbroken.errors import InvalidInputError
from unbroken.rendering.template import TemplateRenderer
from unbroken.reports import write_file
from unbroken.retokenising.changes import IdOrigin

CONFIG = AuditConfig(num_conversations=30)
FORBIDDEN = "<script>alert('audit')</script>"
HOSTILE = templates.QWEN.replace("Answer with", f"{FORBIDDEN.replace(chr(39), '')} \\x1b[31m Answer with").replace(
    "<|im_end|>", "<|<b>end</b>|>"
)
"""With markup in its text and in the token that ends turns."""


@pytest.fixture(scope="module")
def report() -> AuditReport:
    return run_audit(subject_of(templates.QWEN_THINKING), CONFIG)


@pytest.fixture(scope="module")
def hostile() -> AuditReport:
    name = f"{FORBIDDEN}\x1b[31m"
    return run_audit(subject_of(HOSTILE, control_tokens=("<|<b>end</b>|>",), name=name), CONFIG)


def test_the_text_fits_in_80_columns(report: AuditReport, hostile: AuditReport) -> None:
    for each in (report, hostile):
        assert max(map(len, make_report(each).to_text().splitlines())) <= 80


def test_the_text_tells_every_finding(report: AuditReport) -> None:
    text = make_report(report).to_text()
    for label in (
        "template",
        "turns end with",
        "stop ids",
        "a cut turn",
        "concatenation",
        "arguments",
        "forgery",
        "drift",
        "parser",
        "bridges",
        "history",
    ):
        assert f"\n{label}" in text, label
    assert "30 exact, 0 refused, 0 wrong, over 30 random conversations (seed 0)" in " ".join(text.split())
    assert text.count(report.sentence.split(":")[0]) == 1


def test_text_from_outside_cannot_move_a_terminals_cursor(hostile: AuditReport) -> None:
    text = make_report(hostile).to_text()
    assert "\\x1b[31m" in text
    assert all(line.isprintable() for line in text.splitlines())


def test_the_page_opens_offline_and_shows_both_sequences(report: AuditReport, tmp_path: Path) -> None:
    write_file(tmp_path / "new" / "audit.html", to_html(report))
    page = Page((tmp_path / "new" / "audit.html").read_text("utf-8"))
    assert page.loads == []
    assert "fit" in page.classes
    assert "What we train on" in page.text
    exact, retokenised = page.data
    assert {token["origin"] for token in exact} == {origin.value for origin in IdOrigin}
    assert any(token["is_changed"] for token in retokenised)
    assert report.sentence in page.text


def test_everything_from_outside_is_escaped_on_the_page(hostile: AuditReport) -> None:
    text = to_html(hostile)
    assert FORBIDDEN not in text
    assert "<b>end</b>" not in text
    page = Page(text)
    assert page.tags.count("script") == len(page.data) + 1  # ours, which the policy names by its hash
    assert "script-src 'sha256-" in text
    assert FORBIDDEN in page.text
    assert "<|<b>end</b>|>" in page.text
    assert "\x1b" not in text


def test_the_json_is_versioned_and_plain(report: AuditReport) -> None:
    values = report.to_json()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert values["format"] == "unbroken-audit"
    assert values["version"] == JSON_VERSION == 2
    assert values["verdict"] == "fit"
    assert values["exit_code"] == 0
    assert values["kind"]["kind"] == "strips_reasoning_on_user"
    assert values["fuzz"]["num_exact"] == 30
    assert values["fuzz"]["exact_share"] == 1.0
    assert set(values) == {
        "format", "version", "exit_code", "about", "verdict", "sentence", "action", "kind", "turn_ends", "boundaries",
        "arguments", "rendering", "forgery", "drift", "round_trip", "fuzz",
    }  # fmt: skip


def test_the_same_seed_gives_the_same_report(report: AuditReport) -> None:
    again = run_audit(subject_of(templates.QWEN_THINKING), CONFIG)
    assert again.to_json() == report.to_json()
    other = run_audit(subject_of(templates.QWEN_THINKING), AuditConfig(num_conversations=30, seed=1))
    assert other.to_json() != report.to_json()


def audit_alone(source: str, folder: Path) -> AuditReport:
    file = folder / "chat.jinja"
    file.write_text(source)
    return run_audit(load_subject(AuditTarget(template=str(file))), CONFIG)


@pytest.mark.parametrize(
    ("opening", "end"),
    [("<seed:bos>", "<seed:eos>"), ("]~b]", "[e~["), ("[|role|]", "[|endofturn|]"), ("<turn>", "</turn>")],
)
def test_control_tokens_are_found_in_a_template_without_a_tokenizer(opening: str, end: str, tmp_path: Path) -> None:
    source = templates.QWEN.replace("<|im_start|>", opening).replace("<|im_end|>", end)
    report = audit_alone(source, tmp_path)
    assert report.verdict is Verdict.FIT, report.sentence
    assert [token.text for token in report.turn_ends.ends] == [end]
    assert report.turn_ends.stops_inside == ()
    assert report.fuzz.num_exact == 30


def test_without_any_control_token_the_model_s_tokenizer_is_asked_for(tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}"
    report = audit_alone(source + "{% if add_generation_prompt %}ASSISTANT: {% endif %}", tmp_path)
    assert report.verdict is Verdict.UNDECIDED
    assert report.exit_code == 5
    assert "no end of a turn is recognised in the template alone" in report.sentence
    assert "Give the model's tokenizer" in report.action
    assert "UNDECIDED" in to_html(report)
    assert max(map(len, make_report(report).to_text().splitlines())) <= 80


def test_a_recognised_token_that_is_also_inside_turns_is_no_reason_to_ask_for_a_tokenizer(tmp_path: Path) -> None:
    source = templates.QWEN_THINKING.replace("</think>", "<|im_end|>").replace("<think>", "<|im_start|>think")
    report = audit_alone(source, tmp_path)
    assert report.verdict in (Verdict.FIT, Verdict.PARTLY_FIT)
    assert report.turn_ends.stops_inside == ()


def test_a_template_whose_calls_end_a_turn_before_its_text_is_judged_where_sampling_ends(tmp_path: Path) -> None:
    report = audit_alone(templates.CALLS_BEFORE_A_TURN_OF_TEXT, tmp_path)
    assert report.fuzz.num_wrong == 0
    assert report.fuzz.num_exact > 0
    assert report.turn_ends.stops_inside == ()


def test_a_template_that_raises_is_not_usable_also_without_a_tokenizer(tmp_path: Path) -> None:
    report = audit_alone("{{ raise_exception('no') }}{% for m in messages %}{{ m.content }}{% endfor %}", tmp_path)
    assert report.verdict is Verdict.UNFIT


class StopsAtCalls(TemplateRenderer):
    """A renderer with a wrong stop id."""

    def get_stop_token_ids(self) -> tuple[int, ...]:
        stop = self.facts.control_tokens.get_id("<tool_call>")
        assert stop is not None
        return (*super().get_stop_token_ids(), stop)


def test_a_stop_id_inside_a_turn_is_reported() -> None:
    report = run_audit(subject_of(templates.QWEN), CONFIG)
    assert report.turn_ends.stops_inside == ()
    subject = subject_of(templates.QWEN)
    report = run_audit(replace(subject, renderer=StopsAtCalls(subject.tokenizer)), CONFIG)
    assert [token.text for token in report.turn_ends.stops_inside] == ["<tool_call>"]
    assert report.verdict is Verdict.UNFIT
    assert 'sampling would end inside a turn at "<tool_call>"' in report.sentence
    assert "sampling ends inside a turn at" in make_report(report).to_text()


def test_texts_that_are_not_read_back_and_bridges_that_are_not_judged_count_against_fit(report: AuditReport) -> None:
    def verdict_of(**changes: Any) -> tuple[Verdict, str]:
        findings = {"fuzz": report.fuzz, "round_trip": report.round_trip, **changes}
        return find_verdict(report.about, report.kind, report.rendering, report.turn_ends, **findings)[:2]

    assert verdict_of()[0] is Verdict.FIT
    verdict, sentence = verdict_of(fuzz=replace(report.fuzz, num_unjudged=2))
    assert (verdict, "2 more bridges could not be judged" in sentence) == (Verdict.PARTLY_FIT, True)
    verdict, sentence = verdict_of(round_trip=replace(report.round_trip, differences={"content": 3}))
    assert (verdict, "the texts of 3 of 60 turns" in sentence) == (Verdict.PARTLY_FIT, True)


@pytest.mark.parametrize(
    ("source", "verdict", "expected", "action"),
    [
        (templates.QWEN, Verdict.FIT, "as the template has it too", "train with the defaults"),
        (templates.QWEN_THINKING, Verdict.FIT, "history='template'", "train with the defaults"),
        (templates.CHATML, Verdict.PARTLY_FIT, "renders no calls", "Train without tools"),
        (COUNTS_ITS_TURN, Verdict.PARTLY_FIT, "every turn is rendered afresh and forks (30 history_dependent)",
         "Train as it is: a fork costs time"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", Verdict.UNFIT, "no control token", "Give a template"),
        ("{{ raise_exception('no') }}<|im_end|>", Verdict.UNFIT, "accepts none of 30 conversations", "--option"),
        ("{{ messages | length }}<|im_end|>", Verdict.UNFIT, "leaves out the text of a question", "--template FILE"),
    ],
)  # fmt: skip
def test_the_verdict_says_what_we_will_do_and_ends_with_an_action(
    source: str, verdict: Verdict, expected: str, action: str
) -> None:
    report = run_audit(subject_of(source), CONFIG)
    assert report.verdict is verdict, report.sentence
    assert report.exit_code == {Verdict.FIT: 0, Verdict.PARTLY_FIT: 3, Verdict.UNFIT: 4}[verdict]
    assert expected in report.sentence
    assert action in report.action
    assert f"{report.sentence} {report.action}" in " ".join(make_report(report).to_text().split())
    assert report.sentence.count("\n") == 0


def test_what_cannot_be_shown_is_usable_and_the_conversation_that_shows_why_is_quoted() -> None:
    report = run_audit(subject_of(COUNTS_ITS_TURN), CONFIG)
    assert report.fuzz.num_exact == 0
    assert report.exit_code == 3
    assert "Not usable" not in make_report(report).to_text()
    (share,) = report.fuzz.refused
    assert "instead of" in share.detail, "side by side"
    assert "Seen after: text, then a system message" in " ".join(make_report(report).to_text().split())


@pytest.mark.parametrize(
    ("about", "verdict", "action"),
    [
        ({}, Verdict.UNFIT, "This is a bug in unbroken: please report it"),
        ({"is_stand_in": True}, Verdict.UNDECIDED, "Give the model's tokenizer"),
    ],
    ids=["own tokenizer", "stand-in"],
)
def test_a_wrong_bridge_is_our_bug_only_with_the_models_tokenizer(
    report: AuditReport, about: dict[str, Any], verdict: Verdict, action: str
) -> None:
    fuzz = replace(report.fuzz, num_exact=28, num_wrong=2)
    found = find_verdict(
        replace(report.about, **about), report.kind, report.rendering, report.turn_ends, fuzz, report.round_trip
    )
    assert found[0] is verdict
    assert "2 of 30 bridges are not what the template writes" in found[1]
    assert action in found[2]
    assert ("bug" in f"{found[1]} {found[2]}") is (about == {})


def test_one_conversation_at_least_is_needed() -> None:
    with pytest.raises(InvalidInputError, match="num_conversations must be 1 or more, got 0"):
        AuditConfig(num_conversations=0)


def test_the_stand_in_finds_control_tokens_that_are_put_together() -> None:
    source = "{% for m in messages %}{{ '<|' + m.role + '|>' }}{{ m.content }}<|end|>{% endfor %}"
    tokens = set(make_stand_in(source).get_added_vocab())
    assert {"<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"} <= tokens


def test_the_stand_in_does_not_join_two_tokens_that_touch() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<_bot>{{ m.content }}<_end>{% else %}<_user>"
        "{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<_bot>{% endif %}"
    )
    added = set(make_stand_in(source).get_added_vocab())
    assert added == {"<_user>", "<_bot>", "<_end>", "<|bos_token|>", "<|eos_token|>"}


def test_given_tokens_take_the_place_of_the_stand_ins(tmp_path: Path) -> None:
    file = tmp_path / "a.jinja"
    file.write_text("{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}")
    subject = load_subject(AuditTarget(template=str(file), options={"bos_token": "<s>", "eos_token": "</s>"}))
    assert subject.tokenizer.eos_token == "</s>"
    assert [token for token in subject.tokenizer.get_added_vocab() if token.startswith("<|")] == []


def test_templates_that_write_the_same_text_share_a_row_and_are_counted_once(tmp_path: Path) -> None:
    (tmp_path / "one.jinja").write_text(templates.QWEN)
    (tmp_path / "one_training.jinja").write_text("{# marks what is trained on #}" + templates.QWEN)
    (tmp_path / "other.jinja").write_text(templates.CHATML)
    table = make_table(find_templates([tmp_path]), AuditConfig(num_conversations=5), progress=lambda _: None)
    rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{tmp_path.name}/one`, `{tmp_path.name}/one_training`", f"| `{tmp_path.name}/other`"]
    assert "2 templates in 3 files" in table
    assert "Of 10 conversations" in table


def test_the_table_has_a_row_for_each_template_and_one_for_a_broken_one(tmp_path: Path) -> None:
    folder = tmp_path / "site-packages" / "some_package" / "deep"
    folder.mkdir(parents=True)
    (folder / "good.jinja").write_text(templates.QWEN)
    (folder / "bad.jinja").write_text("{% for m in messages %}|")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "numbered.jinja").write_text(COUNTS_ITS_TURN)
    files = find_templates([tmp_path / "site-packages", tmp_path / "own" / "numbered.jinja"])
    lines: list[str] = []
    table = make_table(files, CONFIG, progress=lines.append)
    assert [line.split()[1] for line in lines] == ["own/numbered", "some_package/bad", "some_package/good"]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) == len(lines) == 3
    assert all(row.replace("\\|", "").count("|") == 9 for row in rows)
    assert "`some_package/good` | append-only" in rows[2]
    assert "100.0 % of" in rows[2]
    assert "error" in rows[1]
    assert "history_dependent" in rows[0]
    assert table == make_table(files, CONFIG, progress=lines.append)
    assert "3 templates in 3 files" in table
    with pytest.raises(InvalidInputError, match="exist"):
        find_templates([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInputError, match="folder with one"):
        find_templates([tmp_path / "empty"])
