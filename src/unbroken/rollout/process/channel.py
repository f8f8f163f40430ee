"""The messages between the trainer's process and a sampler: pickled, each behind its length, over TCP.

To unpickle is to run what the sender wrote, so before the first message both ends prove that they have the same key
(`greet`). Orders are counted 0, 1, 2, ...

Arrays that are read-only stay so. Exceptions keep their class and attributes; one that cannot be pickled, or read by
the other process, becomes a `RuntimeError` with its class and message.
"""

from __future__ import annotations

import asyncio
import hmac
import io
import os
import pickle
import secrets
import socket
import struct
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from unbroken.errors import InvalidInputError
from unbroken.rollout.failures import format_error, format_frames
from unbroken.rollout.trajectory import TrajectoryGroup


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a sampler."""

    name: str
    identity: Mapping[str, str]
    """What must be equal in both processes, in words."""


@dataclass(frozen=True, slots=True)
class Open:
    """The answer to `Hello`, unless it is `Failed`."""

    facts: Any


@dataclass(frozen=True, slots=True)
class Opened:
    """The answer to `Open`, unless it is `Failed`."""


@dataclass(frozen=True, slots=True)
class Leave:
    """The sampler ends by SIGTERM: what it has not finished is for others."""


@dataclass(frozen=True, slots=True)
class Order:
    """Sample a group."""

    number: int
    order: Any


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel an order, if it still runs."""

    number: int


@dataclass(frozen=True, slots=True)
class News:
    """For `Work.tell`."""

    news: Any


@dataclass(frozen=True, slots=True)
class Sampled:
    """An order has sampled ids, of a turn that has ended."""

    number: int
    num_ids: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer to an order."""

    number: int
    group: TrajectoryGroup


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The answer to an order that was cancelled: nothing of it runs any more."""

    number: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The error of an order, or without a number that of `Hello` or `Open`."""

    number: int | None
    error: Exception


_LENGTH = struct.Struct("!Q")
_NONCE = 32


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, *, is_server: bool) -> None:
    """Prove to the other end that this one has the key, which is not sent, and have it prove the same.

    Raises:
        InvalidInputError: its key is another one.
        EOFError, OSError: it has closed the connection.
    """
    own = secrets.token_bytes(_NONCE)
    writer.write(own)
    other = await reader.readexactly(_NONCE)
    ours, theirs = (b"server", b"client") if is_server else (b"client", b"server")
    writer.write(hmac.digest(key, ours + own + other, "sha256"))
    if not hmac.compare_digest(await reader.readexactly(32), hmac.digest(key, theirs + other + own, "sha256")):
        raise InvalidInputError("the other end has another key")


def keep_alive(connection: socket.socket) -> None:
    """Have a connection end soon after the other end's machine, also if nothing is sent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}.items():
        if hasattr(socket, option):  # of Linux; a machine without power is lost after 90 s
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


async def connect(connection: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Use a connected socket in this event loop; it ends with the other process or its machine, and with this one."""
    os.register_at_fork(after_in_child=connection.close)  # or it would stay open as long as a fork lives
    keep_alive(connection)
    return await asyncio.open_connection(sock=connection)


class Channel:
    """One end of a connection, whose ends have greeted each other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, message: Any) -> None:
        """Send a message, which is pickled before this returns; nothing is sent if that fails."""
        content = pack(message)
        self._writer.write(_LENGTH.pack(len(content)))
        self._writer.write(content)

    async def receive(self) -> Any:
        """Return the next message; `EOFError` if the other process has closed its end, or is gone."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            content = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError("the other process has closed the channel") from error
        return pickle.loads(content)

    def close(self) -> None:
        """Close this end, once everything is sent."""
        self._writer.close()


def pack(value: Any) -> bytes:
    """Pickle a value for another process of this program."""
    content = io.BytesIO()
    _Pickler(content, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return content.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.ndarray) and not value.flags.writeable and not value.dtype.hasobject:
            return _make_array, (value.tobytes(), value.dtype, value.shape)
        if isinstance(value, BaseException):
            return _reduce_error(value)
        return NotImplemented


def _make_array(content: bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    return np.frombuffer(content, dtype).reshape(shape)


def _reduce_error(error: BaseException) -> Any:
    arguments = _find_builtin(type(error)).__reduce__(error)[1]  # with the name of a file, which `args` lacks
    text = format_error(error)
    note = f"In the sampler:\n{''.join(traceback.format_exception(error))}"
    attributes = {"user_frames": format_frames(error), "__notes__": [*getattr(error, "__notes__", ()), note]}
    try:
        content = pack((type(error), arguments, error.__dict__ | attributes))
        _make_error(*pickle.loads(content))
    except Exception:
        return RuntimeError, (text,)
    return _read_error, (content, text)


def _read_error(content: bytes, text: str) -> BaseException:
    """The error, or its text if this process cannot import its class, which the other one may have made itself."""
    try:
        return _make_error(*pickle.loads(content))
    except Exception:
        return RuntimeError(text)


def _make_error(kind: type[BaseException], arguments: tuple[Any, ...], attributes: Mapping[str, Any]) -> BaseException:
    """Make an error without its own `__init__` and `__new__`, which may take other arguments than those it keeps.

    Those of its built-in class keep what has no place in `attributes`, such as the codec of a `UnicodeError`.
    """
    builtin = _find_builtin(kind)
    error: BaseException = builtin.__new__(kind, *arguments)
    builtin.__init__(error, *arguments)
    error.__dict__.update(attributes)
    return error


def _find_builtin(kind: type[BaseException]) -> Any:
    return next(each for each in kind.__mro__ if each.__module__ == "builtins")
