"""Runs an application as a server: until a signal, for `unbroken serve` and `gateway`, or in a trainer's event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import httptools
import uvicorn
from fastapi import FastAPI
from uvicorn.loops.auto import auto_loop_factory
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from unbroken.engines.base import Engine
from unbroken.engines.registry import EngineOptions, open_engine
from unbroken.errors import InvalidInputError, ServerError
from unbroken.images.decoder import ImageLimits
from unbroken.images.loader import ImageLoader
from unbroken.images.processor import ImageInputs, ImageProcessor, load_image_processor
from unbroken.rendering.base import Renderer
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.rendering.encoding.tokenizer import TokenizerFacts
from unbroken.rendering.loader import load_renderer, load_tokenizer_facts
from unbroken.server.app import create_app, make_image_limits
from unbroken.server.config import ServerConfig, format_url
from unbroken.server.context import MakeRenderer
from unbroken.server.http.guard import MAX_HEAD_BYTES
from unbroken.server.options import AppOptions, CheckEngine, ServeOptions, name_option
from unbroken.threads import give_memory_back, keep_loop_responsive

_ANSWER_S = 5.0
"""Seconds to answer the requests that were not finished when the server stopped."""
StartEngine = Callable[[TextCodec, ImageProcessor | None, ImageLimits], Awaitable[Engine]]


class _MakeApp(Protocol):
    """Makes the application, as `create_app` does."""

    def __call__(
        self,
        engine: Engine,
        make_renderer: MakeRenderer,
        codec: TextCodec,
        config: ServerConfig,
        *,
        image_processor: ImageProcessor | None,
        image_limits: ImageLimits,
        no_images_because: str,
    ) -> FastAPI:
        """Make the application."""
        ...


def serve(options: ServeOptions, *, make_app: _MakeApp = create_app, note: str = "") -> int:
    """Serve until SIGINT or SIGTERM, then give requests in flight `drain_s` to finish. Returns the exit status.

    `make_app` makes the application, by default one without sessions; `note` is printed when it serves.
    """

    async def start(codec: TextCodec, processor: ImageProcessor | None, image_limits: ImageLimits) -> Engine:
        return await open_engine(
            options.engine,
            EngineOptions(
                model=options.model,
                tokenizer=options.tokenizer,
                adapters=options.adapters,
                words=options.engine_options,
                decode=codec.decode,
                image_processor=processor,
                image_limits=image_limits,
                max_top_logprobs=options.config.limits.max_top_logprobs,
            ),
        )

    return run_loop(
        run_server(
            options,
            model=options.model,
            tokenizer=options.tokenizer or options.model,
            start_engine=start,
            make_app=make_app,
            note=note,
            check=options.check,
        )
    )


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run a server in uvloop, where it is installed: 5 % less CPU a turn of the gateway."""
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        return runner.run(main)


def _print_at_once(line: str) -> None:
    print(line, flush=True)


def _locate(tokenizer: str) -> str:
    return str(Path(tokenizer).absolute()) if Path(tokenizer).is_dir() else tokenizer


async def run_server(
    options: AppOptions,
    *,
    model: str,
    tokenizer: str,
    start_engine: StartEngine,
    make_app: _MakeApp,
    note: str = "",
    listeners: Sequence[socket.socket] = (),
    report: Callable[[str], None] = _print_at_once,
    check: CheckEngine | None = None,
) -> int:
    """Start an engine, check it if asked for, and serve it until SIGINT or SIGTERM. Returns the exit status.

    `model` has the image processor, `tokenizer` the template. Their mistakes, and a port in use, are errors before the
    engine starts. `listeners` are served instead of the options' host and port, and opened by the caller; `report` gets
    the line that says so.
    """
    parent = os.getppid()
    facts = load_tokenizer_facts(tokenizer)
    codec = TextCodec(facts)
    image_limits = make_image_limits(options.config.limits)
    processor, no_images_because = _load_image_processor(model, image_limits)
    make_renderer = _keep_default(make_renderer_factory(options, facts, processor, image_limits))
    given = listeners
    with _listening(options, given) as listeners:
        engine = await start_engine(codec, processor, image_limits)
        try:
            await _report_check(check, engine, make_renderer({}))
            app = make_app(
                engine,
                make_renderer,
                codec,
                replace(options.config, tokenizer=_locate(tokenizer)),
                image_processor=processor,
                image_limits=image_limits,
                no_images_because=no_images_because,
            )
            if not given:
                listeners[0].listen()  # whoever reads the line below may connect at once
            report(
                f"unbroken serves {options.config.model_name} at {format_url(*listeners[0].getsockname()[:2])} "
                f"({type(engine).__name__}, {engine.context_length} ids of context{note})"
            )
            await _run_app(app, listeners, options, parent)
        finally:
            await engine.close()
    return 0


def _keep_default(make_renderer: MakeRenderer) -> MakeRenderer:
    """Make the default renderer now, so that errors in the template and its options come before the engine starts.

    It is not made again: each renderer that is loaded logs its template's warnings.
    """
    try:
        default = make_renderer({})
    except InvalidInputError as error:
        raise name_option(error) from None
    return lambda template_kwargs: make_renderer(template_kwargs) if template_kwargs else default


@contextmanager
def _listening(options: AppOptions, given: Sequence[socket.socket]) -> Iterator[Sequence[socket.socket]]:
    """The sockets to serve: those that are given, or one of the options, which is closed whatever ends the block."""
    own = [] if given else [listen(options.host, options.port)]
    try:
        yield given or own
    finally:
        for listener in own:
            listener.close()


async def _report_check(check: CheckEngine | None, engine: Engine, renderer: Renderer) -> None:
    if check is not None:
        print(f"unbroken: {await check(engine, renderer)}", file=sys.stderr, flush=True)


def make_renderer_factory(
    options: AppOptions, tokenizer: TokenizerFacts | str, processor: ImageProcessor | None, limits: ImageLimits
) -> MakeRenderer:
    """Make what makes the renderers of a server, for any template options."""
    images = None
    if processor is not None:
        # The images of requests have been read by the time they reach a renderer: it opens no files.
        images = ImageInputs(processor=processor, loader=ImageLoader(limits=limits, files=False))
    return lambda template_kwargs: load_renderer(
        tokenizer,
        chat_template=options.chat_template,
        template_kwargs=template_kwargs,
        history=options.history,
        parser=options.parser,
        images=images,
    )


async def _run_app(app: FastAPI, listeners: Sequence[socket.socket], options: AppOptions, parent: int) -> None:
    """Run the application until a signal, or until the parent process has ended if `exit_with_parent`."""
    config = make_uvicorn_config(app, drain_s=options.drain_s, keep_alive_s=options.keep_alive_s)
    # Requests that are cancelled at the end are answered, and no failures.
    logging.getLogger("uvicorn.error").addFilter(lambda record: not _is_cancelled(record))
    server = HttpServer(config)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, server.handle_exit, number, None)
    watch = asyncio.create_task(wait_for_parent_exit(parent)) if options.exit_with_parent else None
    if watch is not None:
        watch.add_done_callback(lambda _: server.handle_exit(signal.SIGTERM, None))
    give_memory_back()  # what parsing a tokenizer has freed: 100 MB of 130k entries
    with keep_loop_responsive():
        await server.serve(sockets=list(listeners))
    if server.server_state.tasks:  # cancelled, and being answered
        await asyncio.wait(server.server_state.tasks, timeout=_ANSWER_S)


def _is_cancelled(record: logging.LogRecord) -> bool:
    return record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)


async def wait_for_parent_exit(parent: int, *, every_s: float = 1.0) -> None:
    """Return once the parent process has ended."""
    while os.getppid() == parent:  # noqa: ASYNC110  # asyncio has no event for the end of a parent
        await asyncio.sleep(every_s)


def _load_image_processor(model: str, limits: ImageLimits) -> tuple[ImageProcessor | None, str]:
    """Load the model's image processor. Returns None and the reason if the model serves text only."""
    try:
        return load_image_processor(model, limits=limits), "its model takes text only"
    except InvalidInputError as error:
        print(f"unbroken: images will be refused: {error}", file=sys.stderr, flush=True)
        return None, str(error)


def make_uvicorn_config(app: FastAPI, *, drain_s: int, keep_alive_s: int = 125) -> uvicorn.Config:
    """Configure uvicorn, without WebSockets, and with a limit on the head of a request."""
    return uvicorn.Config(
        app,
        log_level="warning",
        timeout_graceful_shutdown=drain_s,
        timeout_keep_alive=keep_alive_s,
        lifespan="on",
        ws="none",
        http=_Protocol,
    )


class _Protocol(HttpToolsProtocol):
    """Ends a connection whose head does not end: httptools would keep all of it, before any key is checked.

    A request to upgrade the connection is answered as it is. After its head, httptools takes what follows for another
    protocol and reads no body: a new parser reads it, behind a head that has the body's length and nothing else.
    """

    _in_head = False
    _num_bytes = 0
    _data = b""
    _more: bytes | None = None
    """What follows the head of a request to upgrade, for the new parser."""
    _is_body_only = False
    """Whether the parser has a head that was made for a body."""

    def on_message_begin(self) -> None:
        if not self._is_body_only:
            super().on_message_begin()
            self._in_head, self._num_bytes = True, 0

    def on_url(self, url: bytes) -> None:
        if not self._is_body_only:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers are no headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if not self._is_body_only:
            super().on_headers_complete()
        self._is_body_only = False

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:  # uvicorn calls it where httptools found an upgrade
        error = sys.exc_info()[1]
        assert isinstance(error, httptools.HttpParserUpgrade)
        rest = self._data[error.args[0] :]
        lengths = [(name, value) for name, value in self.headers if name in (b"content-length", b"transfer-encoding")]
        head = b"".join(name + b": " + value + b"\r\n" for name, value in lengths)
        self.parser, self._is_body_only = httptools.HttpRequestParser(self), True
        self._more = b"POST / HTTP/1.1\r\n" + head + b"\r\n" + rest

    def data_received(self, data: bytes) -> None:
        self._more = data
        while self._more is not None:
            self._data, self._more = self._more, None
            super().data_received(self._data)
        self._num_bytes += len(data)
        if self._in_head and self._num_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of a request must have at most {MAX_HEAD_BYTES} bytes.")


class HttpServer(uvicorn.Server):
    """Leaves signals to us: uvicorn raises SIGTERM again at its end, which would end this process before the engine.

    Closes connections that have sent no whole head of a request for as long as connections are kept: uvicorn's own
    time begins again with every byte, and only after a first request.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._waiting: dict[Any, tuple[Any, float]] = {}
        """The last request of each connection that has none at work, and since when that is known."""

    async def on_tick(self, counter: int) -> bool:
        """Look at idle connections; uvicorn calls it ten times a second."""
        if counter % 10 == 0:
            self._close_waiting()
        return await super().on_tick(counter)

    def _close_waiting(self) -> None:
        now, before = time.monotonic(), self._waiting
        self._waiting = {}
        for connection in self.server_state.connections:
            cycle = getattr(connection, "cycle", None)  # the protocols of uvicorn that have no requests have none
            if cycle is None or cycle.response_complete:
                known, since = before.get(connection, (cycle, now))
                since = since if known is cycle else now
                self._waiting[connection] = cycle, since
                if now - since > self.config.timeout_keep_alive:
                    connection.transport.close()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to us."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """Open the port before the model is loaded, so that a port in use is an error at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With IPPROTO_TCP asyncio turns off Nagle's algorithm, which would delay each answer by 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise InvalidInputError(f"cannot listen on --host {host} --port {port}: {error}") from None
    return listener


_DRAIN_S = 5


@asynccontextmanager
async def host_app(app: FastAPI, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve an application at an address until the block ends; yields its URL.

    Raises:
        ServerError: the application did not start.
    """
    with listen(host, port) as listener:
        server = HttpServer(make_uvicorn_config(app, drain_s=_DRAIN_S))
        serving = asyncio.create_task(_serve(server, listener))
        try:
            while not server.started and not serving.done():  # noqa: ASYNC110  # uvicorn has no event for it
                await asyncio.sleep(0.01)
            if serving.done():
                serving.result()
            yield format_url(*listener.getsockname()[:2])
        finally:
            server.should_exit = True
            await serving


async def _serve(server: HttpServer, listener: socket.socket) -> None:
    try:
        await server.serve(sockets=[listener])
    except SystemExit:  # as uvicorn ends if the application does not start
        raise ServerError(
            f"the server at {format_url(*listener.getsockname()[:2])} did not start: the log has its error"
        ) from None
