"""Makes a table over many template files, each with a stand-in tokenizer. It contains no times and no local paths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from unbroken.audit.config import AuditConfig, AuditTarget
from unbroken.audit.process import run_in_process
from unbroken.audit.report import KIND_WORDS, LIMITS, TRAIT_WORDS, AuditReport, Trait
from unbroken.errors import InvalidInputError, UnbrokenError
from unbroken.limited_process import ProcessLimits
from unbroken.reports import ReportTable

_LIMITS = LIMITS | {Trait.REFUSES_SYSTEM, Trait.DROPS_SYSTEM}
_HEAD = """\
# Chat templates and their audits

Written by `make templates`, which runs `unbroken audit --table` over the templates that the packages `trl` and `vllm`
ship: {num} templates in {files} files, as files that write the same text share a row. Each was audited with
{conversations} random conversations (seed {seed}) and a small local tokenizer that replaces the model's.
[audit.md](audit.md) says what the columns mean and how to get the whole report for a template.

Of {accepted} conversations that the templates themselves accept, {exact} were bridged exactly ({share:.1f} %),
{refused} were refused with a reason, and {wrong} were wrong. Exact means: the template's own rendering of the whole
conversation, character for character and id for id.

Templates that move the system text to the last question (Mistral's) are refused at each question (`drops_message`),
because the model would read it twice; `history="repeat_system"` bridges them ([history.md](history.md)).

"""
_COLUMNS = ("template", "class", "limits", "turns end with", "parser", "read back", "exact", "refused, by reason")


def find_templates(places: Sequence[Path]) -> list[Path]:
    """Find all `*.jinja` files in folders and their subfolders, and the files named directly, sorted by name.

    Raises `InvalidInputError` if a place does not exist, or there is no template.
    """
    files: set[Path] = set()
    for place in places:
        if not place.exists():
            raise InvalidInputError(f"--table must name folders or files that exist, got {place}")
        files |= {place} if place.is_file() else set(place.rglob("*.jinja"))
    if not files:
        raise InvalidInputError(
            f"--table must name a *.jinja file or a folder with one, got {', '.join(map(str, places))}"
        )
    return sorted(files, key=lambda file: (_name_template(file), str(file)))


def _name_template(file: Path) -> str:
    """Name a template by package and file if it is installed (`trl/qwen3`), else by folder and file."""
    parts = file.absolute().parts
    if "site-packages" in parts[:-1]:
        return f"{parts[parts.index('site-packages') + 1]}/{file.stem}"
    return f"{file.absolute().parent.name}/{file.stem}"


def make_table(
    files: Sequence[Path], config: AuditConfig, limits: ProcessLimits | None = None, *, progress: Callable[[str], None]
) -> str:
    """Audit the templates, each in a process with these limits, and write a table in Markdown.

    Templates that write the same text in all conversations, with the same findings, share a row and are counted once.
    """
    names_of: dict[tuple[str, ...], list[str]] = {}
    """Of the templates with the same digest of texts, and the same cells."""
    reports: list[AuditReport] = []
    for number, file in enumerate(files, 1):
        name = _name_template(file)
        try:
            report = run_in_process(AuditTarget(template=str(file)), config, limits or ProcessLimits())
        except UnbrokenError as error:
            names_of[name, "error", _join_lines(str(error)), "", "", "", "", ""] = [name]
            continue
        finally:
            progress(f"{number}/{len(files)} {name}")
        names = names_of.setdefault((report.rendering.text_sha256, *_make_cells(report)), [])
        names.append(name)
        if len(names) == 1:
            reports.append(report)
    accepted, exact = (sum(getattr(r.fuzz, key) for r in reports) for key in ("num_accepted", "num_exact"))
    head = _HEAD.format(
        num=len(names_of),
        files=len(files),
        conversations=config.num_conversations,
        seed=config.seed,
        accepted=accepted,
        exact=exact,
        share=100 * exact / max(accepted, 1),
        refused=sum(r.fuzz.num_refused for r in reports),
        wrong=sum(r.fuzz.num_wrong for r in reports),
    )
    rows = [(", ".join(f"`{name}`" for name in names), *cells) for (_, *cells), names in names_of.items()]
    return head + ReportTable(columns=_COLUMNS, rows=rows).to_markdown()


def _make_cells(report: AuditReport) -> list[str]:
    fuzz, trip = report.fuzz, report.round_trip
    limits = [TRAIT_WORDS[trait].partition(",")[0] for trait in report.kind.traits if trait in _LIMITS]
    refused = [f"{share.num} {share.reason}" for share in fuzz.refused]
    if fuzz.num_wrong:
        refused.insert(0, f"**{fuzz.num_wrong} wrong**")
    num_read = trip.num_turns - trip.num_not_comparable
    return [
        KIND_WORDS[report.kind.kind].partition(":")[0],
        ", ".join(limits) or "-",
        " ".join(f"`{_join_lines(token.text)}`" for token in report.turn_ends.ends) or "-",
        trip.parser,
        f"{trip.num_same}/{num_read}" if num_read else "-",
        f"{100 * fuzz.exact_share:.1f} % of {fuzz.num_accepted}" if fuzz.num_accepted else "-",
        ", ".join(refused) or "-",
    ]


def _join_lines(text: str) -> str:
    return " ".join(text.split())
