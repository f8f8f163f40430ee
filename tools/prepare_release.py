"""Make a clone ready to be built as a release, for the release workflow; nothing of what it changes is committed.

    python tools/prepare_release.py --owner ACCOUNT --tag v0.1.0 --notes notes.md

- OWNER in the addresses of the metadata, the site and the issue forms becomes the account that publishes.
- Relative links and images of the README become absolute ones of the tag, as package indices need them.
- The changelog's section of the version becomes the notes, with absolute links. An error if tag, version and section
  differ.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

PLACES = ("pyproject.toml", "mkdocs.yml", "CITATION.cff", ".github/ISSUE_TEMPLATE/config.yml")
"""Files with an address of the project: each has OWNER in it."""


def main() -> int:
    """Prepare the clone and return the exit status."""
    parser = argparse.ArgumentParser(description="Make a clone ready to be built as a release.")
    parser.add_argument("--owner", required=True, help="the account that publishes the repository")
    parser.add_argument("--tag", required=True, help="v and the version")
    parser.add_argument("--notes", type=Path, help="file to write the changelog's section to")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the clone")
    arguments = parser.parse_args()
    try:
        prepare(arguments.root, arguments.owner, arguments.tag, arguments.notes)
    except ValueError as error:
        print(f"prepare_release: {error}", file=sys.stderr)
        return 1
    return 0


def prepare(root: Path, owner: str, tag: str, notes: Path | None) -> None:
    """Change the files of a clone; raises `ValueError` if it is not ready."""
    (version,) = re.findall(r'^__version__ = "(.+)"$', (root / "src/unbroken/__init__.py").read_text("utf-8"), re.M)
    if tag != f"v{version}":
        raise ValueError(f"--tag must be v{version}, the version of the package, got {tag}")
    if f"\nversion: {version}\n" not in (root / "CITATION.cff").read_text("utf-8"):
        raise ValueError(f"CITATION.cff must have the version {version}")
    section = re.search(
        rf"^## {re.escape(version)}( \([^)\n]*\))?\n(.*?)(?=^## |\Z)",
        (root / "CHANGELOG.md").read_text("utf-8"),
        re.M | re.S,
    )
    if section is None or "unreleased" in (section[1] or ""):
        raise ValueError(f"CHANGELOG.md must have a section `## {version} (DATE)`, which is not called unreleased")
    repository = f"https://github.com/{owner}/unbroken"
    if notes is not None:  # a page of releases has no files beside it
        notes.write_text(make_absolute(section[2].strip() + "\n", repository, tag), "utf-8")
    for place in PLACES:
        text = (root / place).read_text("utf-8")
        if "OWNER" not in text:
            raise ValueError(f"{place} must have an address with OWNER, which is put in here")
        (root / place).write_text(text.replace("OWNER", owner), "utf-8")
    readme = root / "README.md"
    readme.write_text(make_absolute(readme.read_text("utf-8"), repository, tag), "utf-8")


def make_absolute(text: str, repository: str, tag: str) -> str:
    """The text with absolute links, and with images as files of the repository."""
    raw = repository.replace("https://github.com/", "https://raw.githubusercontent.com/")
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:)([^)\s]+)\)", rf"\g<1>{raw}/{tag}/\2)", text)
    return re.sub(r"(\]\()(?!https?:|#)([^)\s]+)\)", rf"\g<1>{repository}/blob/{tag}/\2)", text)


if __name__ == "__main__":
    sys.exit(main())
