"""Finds the verdict, and a sentence that explains it."""

from __future__ import annotations

from collections.abc import Iterator

from unbroken.audit.report import (
    FuzzFinding,
    KindFinding,
    RenderingFinding,
    RoundTripFinding,
    TemplateKind,
    Trait,
    TurnEndFinding,
    Verdict,
)

_LIMIT_WORDS = {
    Trait.RENDERS_NO_CALLS: "renders no calls, so those of a model are part of its text",
    Trait.REFUSES_RESULTS: "refuses tool results",
    Trait.DROPS_RESULTS: "leaves tool results out",
    Trait.REFUSES_PARALLEL_CALLS: "refuses parallel calls",
    Trait.DROPS_PARALLEL_CALLS: "leaves parallel calls out",
}
_PART_WORDS = {"calls": "calls", "content": "texts", "reasoning": "reasoning texts"}
_HISTORY_WORDS = {
    TemplateKind.APPEND_ONLY: "history stays as it was sampled, as the template has it too",
    TemplateKind.STRIPS_REASONING_ON_USER: (
        "reasoning that the template drops at the next user message stays in view, or forks with history='template'"
    ),
    TemplateKind.STRIPS_REASONING: (
        "reasoning that the template drops later on stays in view, or forks with history='template'"
    ),
    TemplateKind.REWRITES_HISTORY: (
        "history that the template rewrites stays as it was sampled, or forks with history='template'"
    ),
}


def find_verdict(
    kind: KindFinding,
    rendering: RenderingFinding,
    turn_ends: TurnEndFinding,
    fuzz: FuzzFinding,
    round_trip: RoundTripFinding,
    *,
    lacks_tokens: bool,
) -> tuple[Verdict, str]:
    """Find the verdict and its sentence.

    `lacks_tokens`: without the model's tokenizer, no control token was recognised where turns end.
    """
    if lacks_tokens:
        return (
            Verdict.UNDECIDED,
            "Undecided: in this template alone, no control token is recognised where a turn ends. Give the model's "
            "tokenizer, which knows its control tokens: unbroken audit MODEL --template FILE.",
        )
    if kind.kind is TemplateKind.UNDERIVABLE:
        detail = kind.detail or "the end of a turn cannot be found"
        return Verdict.UNFIT, f"Not usable for multi-turn training: no bridge can be derived ({detail})."
    if rendering.num_same < rendering.num_compared:
        return (
            Verdict.UNFIT,
            f"Not usable: {rendering.num_compared - rendering.num_same} of {rendering.num_compared} conversations are "
            "rendered differently than by transformers. This is a bug in unbroken: please report it.",
        )
    if fuzz.num_wrong:
        return (
            Verdict.UNFIT,
            f"Not usable: {fuzz.num_wrong} of {fuzz.num_accepted} bridges are not what the template writes. "
            "This is a bug in unbroken: please report it.",
        )
    if turn_ends.stops_inside:
        stops = " ".join(f'"{token.text}"' for token in turn_ends.stops_inside)
        return (
            Verdict.UNFIT,
            f"Not usable as it is: sampling would end inside a turn at {stops}, which the template also writes in the "
            "middle of turns.",
        )
    if not fuzz.num_exact:
        reasons = _list_reasons(fuzz) or "the template accepts none"
        return (
            Verdict.UNFIT,
            f"Not usable for multi-turn training: none of {fuzz.num_conversations} conversations could be "
            f"bridged ({reasons}), so that every turn would fork.",
        )
    limits = list(_list_limits(kind, fuzz, round_trip))
    history = _HISTORY_WORDS[kind.kind]
    if not limits:
        return Verdict.FIT, f"Fit for multi-turn training: we bridge every turn exactly; {history}."
    return (
        Verdict.PARTLY_FIT,
        f"Usable, within limits: we bridge {fuzz.exact_share:.0%} of the turns that the template accepts exactly, and "
        f"{history}; {'; '.join(limits)}.",
    )


def _list_limits(kind: KindFinding, fuzz: FuzzFinding, round_trip: RoundTripFinding) -> Iterator[str]:
    if fuzz.refused:
        yield f"for the rest we render afresh and fork ({_list_reasons(fuzz)})"
    limits = [text for trait, text in _LIMIT_WORDS.items() if trait in kind.traits]
    if limits:
        yield f"the template {' and '.join(limits)}"
    if fuzz.num_unjudged:
        yield f"{fuzz.num_unjudged} more bridges could not be judged, as the template ends turns differently later on"
    for part, words in _PART_WORDS.items():
        if num := round_trip.differences.get(part):
            written = f"{round_trip.num_turns} turns that the template writes"
            yield f"the {words} of {num} of {written} are not read back the same"


def _list_reasons(fuzz: FuzzFinding) -> str:
    return ", ".join(f"{share.num} {share.reason}" for share in fuzz.refused)
