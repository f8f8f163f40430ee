"""Hooks of mkdocs.yml: pages made from other files of the clone, and links that lead out of docs/."""

from __future__ import annotations

import argparse
import io
import posixpath
import re
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "roadmap.md": "ROADMAP.md",
}
"""Pages of the site that are files of the clone."""


def on_config(config: Any) -> Any:
    """Replace `folder/*` and `name*` in the navigation by the pages that there are."""
    config.nav = _expand(config.nav)
    return config


def _expand(nav: Any) -> Any:
    if isinstance(nav, dict):
        return {title: _expand(inner) for title, inner in nav.items()}
    if not isinstance(nav, list):
        return nav
    found: list[Any] = []
    for each in nav:
        if isinstance(each, str) and each.endswith("*"):
            found += sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").glob(each + ".md"))
        else:
            found.append(_expand(each))
    return found


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=move_links((ROOT / source).read_text("utf-8"))))
    files.append(File.generated(config, "reference/cli.md", content=describe_commands()))
    return files


def move_links(text: str) -> str:
    """The text of a file of the clone as a page of docs/: its links begin one folder higher."""

    def move(match: re.Match[str]) -> str:
        path, hash_mark, anchor = match[2].partition("#")
        moved = {source: page for page, source in PAGES.items()}.get(
            path, posixpath.relpath(path, "docs") if path else ""
        )
        return f"{match[1]}{moved}{hash_mark}{anchor})"

    return re.sub(r"(\]\()(?!https?:)([^)\s]+)\)", move, text)


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Make links to other files of the clone links to the repository, and those to `PAGES` links to the page."""
    folder = posixpath.dirname(posixpath.join("docs", page.file.src_uri))

    def lead_out(match: re.Match[str]) -> str:
        path, hash_mark, anchor = match[1].partition("#")
        target = posixpath.normpath(posixpath.join(folder, path))
        own = {source: page for page, source in PAGES.items()}.get(target)
        if own is not None:
            return f"]({posixpath.relpath(posixpath.join('docs', own), folder)}{hash_mark}{anchor})"
        if not path or (target.startswith("docs/") and not target.startswith("docs/examples")):
            return match[0]
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"]({config.repo_url}/{kind}/main/{target}{hash_mark}{anchor})"

    return re.sub(r"\]\((?!https?:|#)([^)\s]+)\)", lead_out, markdown)


def describe_commands() -> str:
    """The page of the command line: the whole help of every command."""
    from unbroken.cli import _parser, main

    parts = ["# Command line\n\nThe whole help of each command, as `--help-all` prints it."]

    def add(parser: argparse.ArgumentParser, words: list[str]) -> None:
        printed = io.StringIO()
        with redirect_stdout(printed), suppress(SystemExit):
            main([*words, "--help-all"])
        parts.append(f"## unbroken {' '.join(words)}".rstrip() + f"\n```text\n{printed.getvalue().rstrip()}\n```")
        for action in parser._actions:
            for name, inner in (action.choices or {}).items() if isinstance(action.choices, dict) else ():
                add(inner, [*words, name])

    add(_parser(), [])
    printed = io.StringIO()
    with redirect_stdout(printed):
        status = main(["train", "--env", "NAME", "--help-all"])
    if status != 0:  # as where a dependency is not installed: the page would lack all settings, without a warning
        raise RuntimeError(f"`unbroken train --env NAME --help-all` must end with status 0, got {status}")
    text = printed.getvalue().rstrip()
    parts.append(f"## Settings of unbroken train\nThose of prompts, environments and agents.\n```text\n{text}\n```")
    return "\n\n".join(parts) + "\n"
