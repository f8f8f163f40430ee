"""Pages of reports, as tests look at them."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """The tags and classes of a page, what it would load, its text, and the JSON that its script draws."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.classes: set[str] = set()
        self.text = ""
        self.data: list[Any] = []
        self._is_data = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        attributes = dict(attrs)
        self.tags.append(tag)
        self.loads += [attributes[name] for name in ("src", "href") if name in attributes]
        self.classes |= set((attributes.get("class") or "").split())
        self._is_data = attributes.get("type") == "application/json"

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._is_data:
            self.data.append(json.loads(data))
            self._is_data = False
