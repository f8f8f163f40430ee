"""Runs an audit in a process of its own, which is killed if it takes too long or too much memory.

A chat template is a program from outside, and Jinja's sandbox bounds neither its time nor its memory:

    {% for i in range(99999) %}{% for j in range(99999) %}..    stopped at the deadline
    {{ 7 ** (10 ** 12) }}                                        the same, inside a single operation of Python
    {% set x = x ~ x %}, a hundred times                         stopped at the memory limit
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path

from unbroken.audit.config import AuditConfig, AuditTarget, ProcessLimits
from unbroken.audit.report import AuditReport
from unbroken.errors import TemplateError, UnbrokenError

_PRELOAD = ["unbroken.audit.run", "unbroken.audit.loading", "transformers.models.auto.tokenization_auto"]
"""Imported once by the server that audit processes are forked from: `--table` starts one for each template."""


def run_in_process(target: AuditTarget, config: AuditConfig, limits: ProcessLimits) -> AuditReport:
    """Load and audit a target in a new process.

    Raises the errors of `load_subject`, and `TemplateError` if a limit was hit or the process crashed.
    """
    context = _get_context()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sender, target, config, limits), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(limits.timeout_s):
            raise TemplateError(
                f"the audit took longer than {limits.timeout_s:g} s and was stopped: the template has a loop without "
                "an end, or is very slow. Look for loops that do not go over messages, or give it longer with --timeout"
            )
        outcome = receiver.recv()
    except EOFError:
        process.join(1)
        raise TemplateError(
            f"the audit's process ended without a report, with exit code {process.exitcode}: the template exceeded "
            "a limit of the operating system or crashed the interpreter"
        ) from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if isinstance(outcome, UnbrokenError):
        raise outcome
    assert isinstance(outcome, AuditReport)
    return outcome


def _get_context() -> ForkServerContext | SpawnContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _run(sender: Connection, target: AuditTarget, config: AuditConfig, limits: ProcessLimits) -> None:
    """Send a report or an error; the main function of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent kills this process on Ctrl-C.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # Each thread reserves address space.
    from unbroken.audit.loading import load_subject
    from unbroken.audit.run import run_audit

    _set_limits(limits)
    outcome: AuditReport | UnbrokenError
    try:
        outcome = run_audit(load_subject(target), config)
    except UnbrokenError as error:
        outcome = error
    except MemoryError:
        outcome = TemplateError(
            f"the audit needs more than {limits.memory_bytes / (1 << 30):.1f} GiB of memory and was stopped: "
            "the template makes very large values"
        )
    sender.send(outcome)


def _set_limits(limits: ProcessLimits) -> None:
    """Limit memory and CPU time; the latter in case the parent dies and cannot kill this process."""
    try:
        import resource

        num_pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    except (ImportError, OSError):
        return  # Not Linux: the deadline still holds.
    size = num_pages * resource.getpagesize() + limits.memory_bytes
    for kind, limit in ((resource.RLIMIT_AS, size), (resource.RLIMIT_CPU, math.ceil(limits.timeout_s) + 1)):
        hard = resource.getrlimit(kind)[1]
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(kind, (limit, limit))
