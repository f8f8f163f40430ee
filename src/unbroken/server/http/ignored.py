"""Which keys of a body are ignored: those that ask for something, and that no field is for.

    class Format(BodyModel): type: str                body   {"format": {"type": "text", "strict": true}, "user": ""}
    class Body(BodyModel): format: Format | None      names  format.strict      an empty `user` asks for nothing

A model that allows other keys checks them itself, and one that forbids them has refused them.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import AliasChoices, BaseModel

NO_EFFECT: tuple[Any, ...] = (None, False, 0, "", [], {})
"""The defaults of most fields."""
DEFAULTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("add_generation_prompt", "include_reasoning"), (None, True)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (None, True)),
    **dict.fromkeys(("early_stopping", "length_penalty", "stream_interval", "typical_p"), (None, False, 1)),
    "detail": (None, "auto"),
    "modalities": (None, ["text"]),
    "candidateCount": (None, 0, 1),
    "responseModalities": (None, [], ["TEXT"]),
}
"""Of the fields whose default is another value, or for which one of the common values asks for something."""
MAX_NAMED = 20


def asks_for_something(name: str, value: Any) -> bool:
    """Whether a field has another value than its default."""
    return value not in DEFAULTS.get(name, NO_EFFECT)


def find_ignored(given: Any, models: Sequence[type[BaseModel]]) -> list[str]:
    """The keys of a body, of one of these models, that ask for something and are ignored; the first `MAX_NAMED`."""
    return list(_find_ignored(given, models, ""))[:MAX_NAMED]


def list_models(annotation: Any) -> tuple[type[BaseModel], ...]:
    """The models of an annotation whose values may have keys that are ignored."""
    return tuple(model for model in _find_models(annotation) if _may_ignore(model))


def _find_ignored(given: Any, models: Sequence[type[BaseModel]], place: str) -> dict[str, None]:
    """The names, in order; `place` is that of `given`, with a dot."""
    if not models:  # first, or each of 200,000 ids would be looked at
        return {}
    if isinstance(given, list):
        return {name: None for item in given for name in _find_ignored(item, models, place)}
    if not isinstance(given, dict):
        return {}
    # Which model of a union it was is not known here: ignored is what each of them ignores.
    first, *others = [dict.fromkeys(_list_ignored(given, model, place)) for model in models]
    return {name: None for name in first if all(name in other for other in others)}


def _list_ignored(given: dict[str, Any], model: type[BaseModel], place: str) -> Iterator[str]:
    fields = _list_fields(model)
    for name, value in given.items():
        if name in fields:
            yield from _find_ignored(value, fields[name], f"{place}{name}.")
        elif _ignores(model) and asks_for_something(name, value):
            yield f"{place}{name}"


@functools.cache
def _list_fields(model: type[BaseModel]) -> dict[str, tuple[type[BaseModel], ...]]:
    """By each name that a field may have in a body, the models of its value."""
    found: dict[str, tuple[type[BaseModel], ...]] = {}
    for name, field in model.model_fields.items():
        models = list_models(field.annotation)
        aliases = field.validation_alias
        names = aliases.choices if isinstance(aliases, AliasChoices) else [aliases]
        found |= {each: models for each in (name, field.alias, *names) if isinstance(each, str)}
    return found


@functools.cache
def _may_ignore(model: type[BaseModel]) -> bool:
    """Whether a model, or one inside it, ignores keys; others need not be walked."""
    seen: set[type[BaseModel]] = set()
    waiting = [model]
    while waiting:
        each = waiting.pop()
        if each not in seen:
            seen.add(each)
            waiting += [inner for field in each.model_fields.values() for inner in _find_models(field.annotation)]
    return any(map(_ignores, seen))


def _ignores(model: type[BaseModel]) -> bool:
    return model.model_config.get("extra", "ignore") == "ignore"


def _find_models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _find_models(inner)
