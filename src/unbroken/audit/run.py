"""Runs all checks of a subject, and finds the verdict: a sentence, and what a person can do about it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from unbroken.audit.checks.bridges import find_bridges
from unbroken.audit.checks.side_by_side import find_side_by_side
from unbroken.audit.checks.template import (
    find_arguments,
    find_drift,
    find_forgery,
    find_kind,
    find_max_calls,
    find_rendering,
    find_traits,
)
from unbroken.audit.checks.turns import find_boundaries, find_round_trip, find_turn_ends
from unbroken.audit.config import AuditConfig
from unbroken.audit.report import (
    LIMITS,
    PARALLEL_LIMITS,
    TRAIT_WORDS,
    AuditReport,
    AuditSetup,
    FuzzFinding,
    KindFinding,
    RenderingFinding,
    RoundTripFinding,
    TemplateKind,
    Trait,
    TurnEndFinding,
    Verdict,
)
from unbroken.audit.subject import Subject

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
    TemplateKind.UNDERIVABLE: "the template's effect on history could not be seen",
}
_GIVE_TOKENIZER = "Give the model's tokenizer, which knows its control tokens: unbroken audit MODEL --template FILE."


def run_audit(subject: Subject, config: AuditConfig) -> AuditReport:
    """Audit a subject. The same seed gives the same report."""
    traits = find_traits(subject)
    max_calls, with_system = find_max_calls(traits), Trait.REFUSES_SYSTEM not in traits
    round_trip = find_round_trip(subject, seed=config.seed, max_calls=max_calls)
    fuzz = find_bridges(subject, config, max_calls=max_calls, with_system=with_system)
    kind = find_kind(subject, traits, fuzz)
    rendering = find_rendering(subject, config, max_calls=max_calls, with_system=with_system)
    turn_ends, about = find_turn_ends(subject), _describe_subject(subject, config)
    verdict, sentence, action = find_verdict(about, kind, rendering, turn_ends, fuzz, round_trip)
    return AuditReport(
        about=about,
        verdict=verdict,
        sentence=sentence,
        action=action,
        kind=kind,
        rendering=rendering,
        turn_ends=turn_ends,
        boundaries=find_boundaries(subject, max_calls=max_calls),
        arguments=find_arguments(subject),
        forgery=find_forgery(subject, max_calls=max_calls),
        drift=find_drift(subject, seed=config.seed),
        round_trip=round_trip,
        fuzz=fuzz,
        side_by_side=find_side_by_side(subject, max_calls=max_calls),
    )


def _describe_subject(subject: Subject, config: AuditConfig) -> AuditSetup:
    return AuditSetup(
        name=subject.name,
        is_stand_in=subject.is_stand_in,
        template_sha256=hashlib.sha256(subject.facts.source.encode()).hexdigest(),
        num_template_characters=len(subject.facts.source),
        options=subject.options,
        unread_options=subject.find_unread_options(),
        num_vocabulary=len(subject.tokenizer),
        num_control_tokens=len(subject.facts.control_tokens.ids),
        seed=config.seed,
    )


def find_verdict(
    about: AuditSetup,
    kind: KindFinding,
    rendering: RenderingFinding,
    turn_ends: TurnEndFinding,
    fuzz: FuzzFinding,
    round_trip: RoundTripFinding,
) -> tuple[Verdict, str, str]:
    """Find the verdict, its sentence, and the action to take."""
    if fault := _find_fault(about, kind, rendering, turn_ends, fuzz):
        return fault
    history = _HISTORY_WORDS[kind.kind]
    limits = list(_list_limits(kind, fuzz, round_trip))
    if not limits:
        action = "Nothing is to be changed: train with the defaults."
        if about.is_stand_in:
            action = "Audit the model with its own tokenizer before you train: unbroken audit MODEL."
        return Verdict.FIT, f"Fit for multi-turn training: we bridge every turn exactly; {history}.", action
    facts = "; ".join(fact for fact, _ in limits)
    bridged = f"we bridge {fuzz.exact_share:.0%} of the turns that the template accepts exactly, and {history}"
    return (
        Verdict.PARTLY_FIT,
        f"Usable, within limits: {bridged if fuzz.num_exact else 'no turn could be shown to be bridged exactly'}; "
        f"{facts}.",
        " ".join(action for _, action in limits),
    )


def _find_fault(
    about: AuditSetup, kind: KindFinding, rendering: RenderingFinding, turn_ends: TurnEndFinding, fuzz: FuzzFinding
) -> tuple[Verdict, str, str] | None:
    """What makes a template not usable, or leaves it undecided."""
    if rendering.num_same < rendering.num_compared:
        return (
            Verdict.UNFIT,
            f"Not usable: {rendering.num_compared - rendering.num_same} of {rendering.num_compared} conversations are "
            "rendered differently than by transformers.",
            "This is a bug in unbroken: please report it, with the template and this report.",
        )
    if not (fuzz.num_accepted or fuzz.num_unjudged):
        return (
            Verdict.UNFIT,
            f"Not usable: the template accepts none of {fuzz.num_conversations} conversations "
            f"({kind.detail or 'it refuses them, or leaves out their messages'}).",
            "Give the variables that the template reads (--option KEY=VALUE), or another template (--template FILE).",
        )
    if fuzz.num_wrong:
        return _judge_wrong_bridges(about, fuzz)
    if not turn_ends.ends and about.is_stand_in:
        sentence = f"Undecided: no end of a turn is recognised in the template alone ({kind.detail})."
        return Verdict.UNDECIDED, sentence, _GIVE_TOKENIZER
    if not turn_ends.ends:
        return (
            Verdict.UNFIT,
            f"Not usable for multi-turn training: no bridge can be derived ({kind.detail}).",
            "Give a template in which a control token ends the assistant's turns and stands nowhere else in them "
            "(--template FILE).",
        )
    if turn_ends.stops_inside:
        stops = " ".join(f'"{token.text}"' for token in turn_ends.stops_inside)
        return (
            Verdict.UNFIT,
            f"Not usable as it is: sampling would end inside a turn at {stops}, which the template also writes in the "
            "middle of turns.",
            f"Take {stops} out of the stop ids: those of generation_config.json.",
        )
    return None


def _judge_wrong_bridges(about: AuditSetup, fuzz: FuzzFinding) -> tuple[Verdict, str, str]:
    wrong = f"{fuzz.num_wrong} of {fuzz.num_accepted} bridges are not what the template writes"
    if about.is_stand_in:
        sentence = f"Undecided: {wrong}, with a stand-in tokenizer whose control tokens are guessed from the template."
        return Verdict.UNDECIDED, sentence, _GIVE_TOKENIZER
    return (
        Verdict.UNFIT,
        f"Not usable: {wrong}.",
        "This is a bug in unbroken: please report it, with the template and the conversation under `bridges`.",
    )


def _list_limits(kind: KindFinding, fuzz: FuzzFinding, round_trip: RoundTripFinding) -> Iterator[tuple[str, str]]:
    """List the limits, each with the action that it asks for."""
    if fuzz.refused:
        yield _describe_refusals(fuzz)
    if limits := [trait for trait in kind.traits if trait in LIMITS]:
        yield (
            f"the template {', and '.join(TRAIT_WORDS[trait] for trait in limits)}",
            "Let a turn make one call only, or give a template that carries several (--template FILE)."
            if PARALLEL_LIMITS.issuperset(limits)
            else "Train without tools, or give a template that carries calls and their results (--template FILE).",
        )
    if fuzz.num_unjudged:
        yield (
            f"{fuzz.num_unjudged} more bridges could not be judged, as the template ends turns differently later on",
            "Nothing is to be done about those: a rollout checks each bridge on its own conversation.",
        )
    parts = " and ".join(
        f"the {words} of {num}" for part, words in _PART_WORDS.items() if (num := round_trip.differences.get(part))
    )
    if parts:
        written = f"{round_trip.num_turns} turns that the template writes"
        yield (
            f"{parts} of {written} are not read back the same",
            "Look at the example under `parser`, and name the model's own format if that is not it (--parser NAME).",
        )


def _describe_refusals(fuzz: FuzzFinding) -> tuple[str, str]:
    reasons = ", ".join(f"{share.num} {share.reason}" for share in fuzz.refused)
    situations = "; ".join(sorted({each for share in fuzz.refused for each in share.situations}))
    return (
        f"{'the rest' if fuzz.num_exact else 'every turn'} is rendered afresh and forks ({reasons})",
        f"Train as it is: a fork costs time and no exactness. To have none, avoid what was refused ({situations}), "
        "or give another template (--template FILE).",
    )
