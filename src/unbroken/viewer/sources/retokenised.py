"""What the usual pipeline would have made of the branches of a recorded rollout.

It needs the tokenizer and the chat template of the run's model, and compares nothing where they are not on this
machine.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.rendering.encoding.text_codec import TokenTexts
from unbroken.retokenising.changes import CAUSE_WORDS, IdOrigin
from unbroken.retokenising.comparison import Retokenised, TemplateTexts
from unbroken.retokenising.records import retokenise_row

MAX_ROWS = 32
"""Further branches are not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateSource:
    """Where the tokenizer and the template of a model are, and what the template gets."""

    folder: Path
    renderer: str
    """The settings `[renderer]` of the run, as JSON."""


@functools.lru_cache(maxsize=8)
def load_template_texts(source: TemplateSource) -> TemplateTexts | None:
    """Load a tokenizer and its template; None if there is no template that can be used."""
    from unbroken.rendering.loader import load_renderer, load_tokenizer

    folder, renderer = str(source.folder), json.loads(source.renderer)
    options = {name: renderer[name] for name in ("template_kwargs", "parser") if renderer.get(name)}
    try:
        return TemplateTexts(tokenizer=load_tokenizer(folder), template_renderer=load_renderer(folder, **options))
    except Exception:  # of a damaged folder, transformers raises anything
        return None


def retokenise_recorded(shown: Mapping[str, Any], source: TemplateSource) -> dict[str, Any]:
    """Load what `retokenise_trajectory` needs, and call it: in a separate process, as the template is not ours."""
    return retokenise_trajectory(shown, load_template_texts(source))


def retokenise_trajectory(shown: Mapping[str, Any], texts: TemplateTexts | None) -> dict[str, Any]:
    """What a page shows of it: `rows`, for each its ids and each stretch that changed; or why not, as `problem`.

    `shown` is a rollout as the page has it: its record, and the turn of each node.
    """
    rows = shown["record"].get("rows") or []
    if texts is None:
        return _refuse(
            f"The tokenizer and the chat template of {shown.get('model')} are not on this machine, "
            "or have links in their folder: `unbroken view RUN --tokenizer FOLDER` names another."
        )
    if not rows:
        return _refuse("There are no ids.")
    return {"rows": [_try_row(shown, row, texts) for row in rows[:MAX_ROWS]]}


def _try_row(shown: Mapping[str, Any], row: Mapping[str, Any], texts: TemplateTexts) -> dict[str, Any]:
    try:
        found = retokenise_row(shown["record"], row, shown["turn_of_node"], texts)
        return _refuse(found) if isinstance(found, str) else _describe(found, tokenizer=texts.tokenizer)
    except Exception as error:  # a damaged record, or one of another tokenizer, can fail anywhere
        return _refuse(f"It cannot be compared: {type(error).__name__}: {error}"[:500])


def _describe(found: Retokenised, *, tokenizer: Any) -> dict[str, Any]:
    ids = found.retokenised_ids.tolist()
    gaps = [(each.gap.before, each.gap.after, sorted(each.causes)) for each in found.changes]
    return {
        "token_ids": ids, "num_ids": len(found.token_ids),
        "num_sampled": found.origins.count(IdOrigin.SAMPLED), "num_changed": found.count_changed_ids(),
        "changes": [{"before": before, "after": after, "causes": causes} for before, after, causes in gaps],
        "cause_words": {cause: CAUSE_WORDS[cause] for cause in sorted(found.causes)},
        "texts": {each: text.text for each, text in _read_token_texts(tokenizer).get_all(set(ids)).items()},
    }  # fmt: skip


def _refuse(problem: str) -> dict[str, Any]:
    return {"problem": problem}


@functools.lru_cache(maxsize=8)  # half a second for a vocabulary of 150,000 ids
def _read_token_texts(tokenizer: Any) -> TokenTexts:
    return TokenTexts(tokenizer.backend_tokenizer)
