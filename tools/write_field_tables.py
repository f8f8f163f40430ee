"""Write the tables of fields in docs/protocols.md from `unbroken.server.wire.fields`, between their two marks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel

from unbroken.reports import ReportTable
from unbroken.server.http.ignored import DEFAULTS
from unbroken.server.routes.chat import ChatBody
from unbroken.server.routes.completions import CompletionBody
from unbroken.server.routes.token_generate import TokenGenerateBody, TokenSampling
from unbroken.server.wire import fields
from unbroken.server.wire.anthropic import MessagesBody
from unbroken.server.wire.fields import Fields
from unbroken.server.wire.gemini import ContentPart, ContentsBody, GenerationConfig
from unbroken.server.wire.responses import ResponsesBody

PAGE = Path(__file__).parents[1] / "docs/protocols.md"
START, END = "<!-- fields: made by `make fields` -->\n", "<!-- end of fields -->\n"
TABLES: tuple[tuple[str, Fields, type[BaseModel] | None], ...] = (
    ("`/v1/chat/completions` and below, `/tokenize`", fields.CHAT, ChatBody),
    ("`/v1/completions`", fields.COMPLETIONS, CompletionBody),
    ("`/v1/responses`", fields.RESPONSES, ResponsesBody),
    ("Items and parts of `/v1/responses`", fields.RESPONSES_ITEMS, None),
    ("`/v1/messages`", fields.MESSAGES, MessagesBody),
    ("Blocks and tools of `/v1/messages`", fields.MESSAGES_BLOCKS, None),
    ("`:generateContent`, `:streamGenerateContent`", fields.GEMINI, ContentsBody),
    ("`generationConfig` of `:generateContent`", fields.GEMINI_CONFIG, GenerationConfig),
    ("Parts of `:generateContent`, and what is in them", fields.GEMINI_PARTS, ContentPart),
    ("Tools and `toolConfig` of `:generateContent`", fields.GEMINI_TOOLS, None),
    ("`/inference/v1/generate`", fields.GENERATE, TokenGenerateBody),
    ("`sampling_params` of `/inference/v1/generate`", fields.GENERATE_SAMPLING, TokenSampling),
)


def make_tables() -> str:
    """The tables of all dialects."""
    return "".join(_make_table(*table) for table in TABLES)


def write_page(page: str) -> str:
    """The page with new tables."""
    before, rest = page.split(START)
    return f"{before}{START}{make_tables()}{rest[rest.index(END) :]}"


def list_names(body: type[BaseModel]) -> set[str]:
    """The fields of a body as its clients write them."""
    return {field.alias or name for name, field in body.model_fields.items()}


def _make_table(title: str, known: Fields, body: type[BaseModel] | None) -> str:
    rest = "ignored" if known.ignores_unknown else "refused"
    rows = []
    if body is not None:
        rows.append((", ".join(f"`{name}`" for name in sorted(list_names(body))), "followed", ""))
    rows += _make_rows(known.refused, "refused") + _make_rows(known.ignored, "ignored")
    rows.append(("any other", rest, "it is not a known field"))
    return f"\n**{title}**\n\n{ReportTable(columns=('fields', 'here', 'why'), rows=rows).to_markdown()}"


def _make_rows(reasons: Mapping[str, str], effect: str) -> list[tuple[str, str, str]]:
    return [(", ".join(map(_format_name, names.split())), effect, why) for why, names in reasons.items()]


def _format_name(name: str) -> str:
    """A name, and what the field may be although it is not followed, where that is neither null nor empty."""
    values = [json.dumps(value) for value in DEFAULTS.get(name, ()) if value]
    return f"`{name}`" + (f" (may be `{values[0]}`)" if values else "")


if __name__ == "__main__":
    PAGE.write_text(write_page(PAGE.read_text()))
