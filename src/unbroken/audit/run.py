"""Runs all checks of one subject."""

from __future__ import annotations

import hashlib

from unbroken.audit.checks.arguments import find_arguments
from unbroken.audit.checks.boundary import find_boundaries
from unbroken.audit.checks.bridges import find_bridges
from unbroken.audit.checks.drift import find_drift
from unbroken.audit.checks.forgery import find_forgery
from unbroken.audit.checks.kind import find_kind, find_max_calls, find_traits
from unbroken.audit.checks.rendering import find_rendering
from unbroken.audit.checks.round_trip import find_round_trip
from unbroken.audit.checks.side_by_side import find_side_by_side
from unbroken.audit.checks.turn_ends import find_turn_ends
from unbroken.audit.config import AuditConfig
from unbroken.audit.report import AuditReport, AuditSetup, Trait
from unbroken.audit.subject import Subject
from unbroken.audit.verdict import find_verdict


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
        renderer=subject.renderer_name,
        template_sha256=hashlib.sha256(subject.facts.source.encode()).hexdigest(),
        num_template_characters=len(subject.facts.source),
        options=subject.options,
        unread_options=subject.find_unread_options(),
        num_vocabulary=len(subject.tokenizer),
        num_control_tokens=len(subject.facts.control_tokens.ids),
        seed=config.seed,
    )
