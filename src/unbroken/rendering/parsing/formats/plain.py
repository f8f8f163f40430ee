"""No calls: reasoning and content only, for templates that render no calls and name no format."""

from __future__ import annotations

from unbroken.rendering.parsing.format import Format, thinking

PLAIN = Format(name="none", regions=(thinking(),))
