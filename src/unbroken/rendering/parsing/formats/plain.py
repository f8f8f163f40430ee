"""No calls: reasoning and content only, for templates that render no calls and name no format."""

from __future__ import annotations

from unbroken.rendering.parsing.call_format import CallFormat, reasoning_region

PLAIN = CallFormat(name="none", regions=(reasoning_region(),))
