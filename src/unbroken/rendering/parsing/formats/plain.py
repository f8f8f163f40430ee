"""No calls, only reasoning and content: for templates that show no call format."""

from __future__ import annotations

from unbroken.rendering.parsing.call_format import CallFormat, reasoning_region

PLAIN = CallFormat(name="none", regions=(reasoning_region(),))
