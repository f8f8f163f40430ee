"""The verdict in one sentence: what a training run may expect, and what we will do."""

from __future__ import annotations

from collections.abc import Iterator

from unbroken.audit.report import (
    FuzzFinding,
    KindFinding,
    RenderingFinding,
    RoundTripFinding,
    TemplateKind,
    Trait,
    Verdict,
)

_LIMITS = {
    Trait.RENDERS_NO_CALLS: "renders no calls, so those of a model are part of its text",
    Trait.REFUSES_RESULTS: "refuses tool results",
    Trait.DROPS_RESULTS: "leaves tool results out",
    Trait.REFUSES_PARALLEL_CALLS: "refuses parallel calls",
    Trait.DROPS_PARALLEL_CALLS: "leaves parallel calls out",
}
_ON_HISTORY = {
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
    kind: KindFinding, rendering: RenderingFinding, fuzz: FuzzFinding, round_trip: RoundTripFinding
) -> tuple[Verdict, str]:
    """The verdict, and the sentence for it."""
    if kind.kind is TemplateKind.UNDERIVABLE:
        detail = kind.detail or "its end cannot be told"
        return Verdict.UNFIT, f"Not usable for multi-turn training: no bridge can be derived ({detail})."
    if rendering.num_same < rendering.num_compared:
        return (
            Verdict.UNFIT,
            f"Not usable: {rendering.num_compared - rendering.num_same} of {rendering.num_compared} conversations are "
            "rendered otherwise than transformers renders them. This is a fault to report.",
        )
    if fuzz.num_wrong:
        return (
            Verdict.UNFIT,
            f"Not usable: {fuzz.num_wrong} of {fuzz.num_accepted} bridges are not what the template writes. "
            "This is a fault to report.",
        )
    if not fuzz.num_exact:
        told = _reasons(fuzz) or "the template accepts none"
        return (
            Verdict.UNFIT,
            f"Not usable for multi-turn training: of {fuzz.num_conversations} conversations none could be bridged "
            f"({told}), so that every turn would fork.",
        )
    limits = list(_limits(kind, fuzz, round_trip))
    kept = _ON_HISTORY[kind.kind]
    if not limits:
        return Verdict.FIT, f"Fit for multi-turn training: we bridge every turn exactly; {kept}."
    return (
        Verdict.PARTLY_FIT,
        f"Usable, within limits: we bridge {fuzz.exact_share:.0%} of the turns that the template accepts exactly, and "
        f"{kept}; {'; '.join(limits)}.",
    )


def _limits(kind: KindFinding, fuzz: FuzzFinding, round_trip: RoundTripFinding) -> Iterator[str]:
    if fuzz.refused:
        yield f"for the rest we render afresh and fork ({_reasons(fuzz)})"
    told = [text for trait, text in _LIMITS.items() if trait in kind.traits]
    if told:
        yield f"the template {' and '.join(told)}"
    if round_trip.differences.get("calls"):
        num = round_trip.differences["calls"]
        yield f"the calls of {num} of {round_trip.num_turns} turns that the template writes are not read back the same"


def _reasons(fuzz: FuzzFinding) -> str:
    return ", ".join(f"{share.num} {share.reason}" for share in fuzz.refused)
