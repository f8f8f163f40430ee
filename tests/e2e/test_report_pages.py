"""The page of an audit in a browser: its grids are the viewer's, and hostile text is text."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import templates
from support.audits import subject_of
from support.browser import CHROMIUM, Browser
from unbroken.audit.config import AuditConfig
from unbroken.audit.output import to_html
from unbroken.audit.run import run_audit
from unbroken.reports import write_file

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
MARKUP = "<script>hacked()</script><img src=x onerror=hacked()>"


def test_an_audit_opens_offline_with_two_grids_and_runs_nothing_of_the_template(
    browser: Browser, tmp_path: Path
) -> None:
    template = templates.QWEN.replace("Answer with", f"{MARKUP} Answer with").replace("<|im_end|>", "<|<b>end</b>|>")
    report = run_audit(subject_of(template, control_tokens=("<|<b>end</b>|>",)), AuditConfig(num_conversations=10))
    write_file(tmp_path / "audit.html", to_html(report))
    browser.open((tmp_path / "audit.html").as_uri())
    browser.wait("document.querySelectorAll('.grid').length === 2")
    assert browser.run("document.querySelectorAll('.grid .cell').length") > 50
    assert browser.run("document.querySelectorAll('main b b, main img, .grid script').length") == 0
    browser.run("document.querySelector('.ids .grid').scrollTop = 0")
    browser.run("document.querySelector('.cell[data-n]').click()")
    assert "position" in browser.run("document.querySelector('.ids .inspector').innerText")
    for width in (400, 1200):
        browser.open((tmp_path / "audit.html").as_uri(), width=width, dark=width == 400)
        assert browser.run("document.documentElement.scrollWidth") <= width
        browser.take_picture(tmp_path / f"{width}.png")
