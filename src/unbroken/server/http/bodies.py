"""Base classes and field types for request bodies: strict fields, ids, prompts as text or ids.

An error names one field, its rule and the value. So a prompt's form is found before its fields are checked, since a
plain union would report an error for each form, and the check of a list stops at its first invalid entry.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError


class BodyModel(BaseModel):
    """A body or a part of one. No value is converted; unknown keys are ignored."""

    model_config = ConfigDict(strict=True, use_attribute_docstrings=True, protected_namespaces=())


class StrictBody(BodyModel):
    """A `BodyModel` in which an unknown key is an error."""

    model_config = ConfigDict(extra="forbid")


OneT = TypeVar("OneT")
ItemT = TypeVar("ItemT")
Id = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Ids = Annotated[list[Id], Field(fail_fast=True)]
_Bias = Annotated[tuple[Id, Annotated[float, Field(strict=True)]], Field(strict=False)]  # JSON has no tuples
Biases = Annotated[list[_Bias], Field(fail_fast=True)]
Words = Annotated[list[Ids], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


def _find_form_of_prompts(value: Any) -> str | None:
    if not isinstance(value, list):
        return None
    if value and all(isinstance(item, np.ndarray) for item in value):
        return "<arrays>"
    if all(isinstance(item, str) for item in value):
        return "<texts>"
    return "<lists of ids>" if all(isinstance(item, list) for item in value) else None


def _find_form_of_prompt(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if isinstance(value, list) and value and not any(isinstance(item, (str, list)) for item in value):
        return "<ids>"
    return _find_form_of_prompts(value)


def _find_form_of_several(value: Any) -> str:
    return "<several>" if isinstance(value, list) else "<one>"


Prompts = Annotated[
    Annotated[Texts, Tag("<texts>")]
    | Annotated[Annotated[list[Ids], Field(fail_fast=True)], Tag("<lists of ids>")]
    | Annotated[SkipJsonSchema[list[Any]], Tag("<arrays>")],
    Discriminator(
        _find_form_of_prompts,
        custom_error_type="prompts",
        custom_error_message="must be a list of texts, or a list of lists of ids, not a mixture of both",
    ),
]
"""Several prompts: all texts, or all lists of ids."""

PromptOrPrompts = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[Texts, Tag("<texts>")]
    | Annotated[Ids, Tag("<ids>")]
    | Annotated[Annotated[list[Ids], Field(fail_fast=True)], Tag("<lists of ids>")],
    Discriminator(
        _find_form_of_prompt,
        custom_error_type="prompt",
        custom_error_message="must be a text, a list of texts, a list of ids, or a list of lists of ids, not a "
        "mixture of them",
    ),
]
"""One prompt or several, as OpenAI's text completions take them."""

OneOrSeveral = Annotated[
    Annotated[OneT, Tag("<one>")] | Annotated[Annotated[list[ItemT], Field(fail_fast=True)], Tag("<several>")],
    Discriminator(_find_form_of_several),
]
"""`OneOrSeveral[One, Item]`: one thing, or a list of items."""

ObjectOrObjects = OneOrSeveral[dict[str, Any], dict[str, Any] | None]
"""One object, or a list of objects and nulls."""

TextOrTexts = OneOrSeveral[str, str]


def by_type(*names: str, what: str, default: str | None = None) -> tuple[BeforeValidator, Discriminator]:
    """What chooses a union's member by the key `type`; the members are `Annotated[..., Tag("<NAME>")]`.

    An object of another type is refused by its name; `what` are the objects, in the plural. Without a type it is of the
    type `default`.
    """

    def check(value: Any) -> Any:
        if isinstance(value, dict) and (found := value.get("type", default)) not in names:
            raise PydanticCustomError(
                "type",
                "of the type {found} is not one of the {what} that this server takes ({names})",
                {"found": repr(found)[:80], "what": what, "names": ", ".join(names)},
            )
        return value

    def find_tag(value: Any) -> str | None:
        return f"<{value.get('type', default)}>" if isinstance(value, dict) else None

    return BeforeValidator(check), Discriminator(
        find_tag, custom_error_type="object", custom_error_message="must be an object with a type"
    )
