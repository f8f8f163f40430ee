"""What every route of one server works with."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from starlette.requests import Request

from unbroken.rendering.base import Renderer
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.rendering.template import TemplateRenderer
from unbroken.server.config import ServerConfig
from unbroken.server.http.errors import HttpError
from unbroken.server.images.intake import ImageIntake
from unbroken.server.metrics import Metrics
from unbroken.server.service import SamplingService
from unbroken.server.weights import WeightLoader

_T = TypeVar("_T")
MakeRenderer = Callable[[Mapping[str, Any]], Renderer]
"""Template options (`chat_template_kwargs`) to a renderer: options are part of a renderer's identity."""
_MOST_RENDERERS = 32
_RESERVED = frozenset(
    {
        "messages", "tools", "add_generation_prompt", "continue_final_message", "conversation", "chat_template",
        "tokenize", "return_dict", "bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token",
        "mask_token",
    }
)  # fmt: skip
"""Variables of a template that are no options."""


class ServerContext:
    """One server's parts. `text` runs what reads or writes text in a thread of its own, so that nobody waits for it."""

    def __init__(
        self,
        *,
        service: SamplingService,
        make_renderer: MakeRenderer,
        codec: TextCodec,
        images: ImageIntake,
        weights: WeightLoader,
        config: ServerConfig,
        metrics: Metrics,
    ) -> None:
        self.service = service
        self.codec = codec
        self.images = images
        self.weights = weights
        self.config = config
        self.metrics = metrics
        self._make_renderer = make_renderer
        self._renderers: OrderedDict[str, Renderer] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None

    async def text(self, work: Callable[[], _T]) -> _T:
        """Run `work` (rendering, parsing, encoding) in the text thread, which its first use starts."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="unbroken-text")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def renderer(self, options: Mapping[str, Any] | None = None, settings: str = "{}") -> Renderer:
        """The renderer with these template options; call it in the text thread. The last 32 are kept.

        Args:
            options: `chat_template_kwargs`.
            settings: of images, as in `ImageSpan`.

        Raises:
            HttpError: an option has a name of the template's own variables, or the renderer takes text only.
        """
        renderer = self._renderer(options)
        if settings == "{}":
            return renderer
        if not isinstance(renderer, TemplateRenderer):
            raise HttpError(
                400,
                f"mm_processor_kwargs must be absent, got {settings}: the server's renderer takes text only",
                param="mm_processor_kwargs",
            )
        return renderer.with_image_settings(settings)

    def _renderer(self, options: Mapping[str, Any] | None) -> Renderer:
        reserved = sorted(_RESERVED & set(options or {}))
        if reserved:
            raise HttpError(
                400,
                f"chat_template_kwargs must not hold {reserved}: the server itself gives these to the template",
                param="chat_template_kwargs",
            )
        key = json.dumps(options or {}, sort_keys=True)
        if key not in self._renderers:
            self._renderers[key] = self._make_renderer(dict(options or {}))
            if len(self._renderers) > _MOST_RENDERERS:
                self._renderers.popitem(last=False)
        self._renderers.move_to_end(key)
        return self._renderers[key]

    def stop_token_ids(self) -> tuple[int, ...]:
        """The ids that end a turn."""
        return self.renderer().get_stop_token_ids()

    def adapter_of(self, model: str | None) -> str | None:
        """The adapter that `model` names; None for the model itself, which None means too.

        Raises:
            HttpError: 404 for any other name.
        """
        config = self.config
        if model in config.adapters:
            return model
        if model is not None and model != config.model_name:
            raise HttpError(
                404,
                f"the model {model!r} does not exist: this server has {[config.model_name, *config.adapters]}",
                param="model",
                code="model_not_found",
            )
        return None

    def close(self) -> None:
        """End the threads. An application that starts again starts others."""
        self.images.close()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None


def context_of(request: Request) -> ServerContext:
    """The context of the server that a request came to."""
    return cast(ServerContext, request.app.state.context)
