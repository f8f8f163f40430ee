"""Runs an audit in a separate process."""

from __future__ import annotations

from unbroken.audit.config import AuditConfig, AuditTarget
from unbroken.audit.report import AuditReport
from unbroken.limited_process import LimitedProcess, ProcessLimits
from unbroken.progress import begin, show_progress

_PRELOAD = ("unbroken.audit.run", "unbroken.audit.subject", "transformers.models.auto.tokenization_auto")


def run_in_process(target: AuditTarget, config: AuditConfig, limits: ProcessLimits) -> AuditReport:
    """Load and audit a target in a new process: `--table` starts one for each template.

    Raises the errors of `load_subject`, and `TemplateError` if a limit was hit or the process crashed.
    """
    advice = ". Look for loops that do not go over messages, or give it longer with --timeout"
    process = LimitedProcess(_run, limits, name="the audit", preload=_PRELOAD, advice=advice)
    with show_progress():
        begin(f"audit of {target.template or target.model} (it may take {limits.timeout_s:g} s)")
        try:
            return process.call(target, config)
        finally:
            process.close()


def _run(target: AuditTarget, config: AuditConfig) -> AuditReport:
    from unbroken.audit.run import run_audit
    from unbroken.audit.subject import load_subject

    return run_audit(load_subject(target), config)
