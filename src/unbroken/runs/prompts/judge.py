r"""A judge: a model behind a URL that scores completions, in the dialect of OpenAI's chat completions.

# rewards.py                                              # task.toml
from unbroken.runs.prompts.judge import Judge             [[rewards]]
                                                          function = "rewards.py:judge"
judge = Judge(
    "http://localhost:8000/v1", "the-judge",
    prompt="Question: {question}\nAnswer: {completion}\nReply with a number from 0 to 1, and nothing else.",
    cache=Path(__file__).with_name("judge.sqlite"), max_requests=50_000,
)

completion ── prompt ──► request ── digest ── in the cache? ──► its reply ──────────────┐
                            └── budget left? ── POST /chat/completions ──► reply ───────┴─ parse ──► reward
                                   no: the run ends       again, if it failed or does not parse
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
import string
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from unbroken.counters import add_cost
from unbroken.errors import (
    InvalidInputError,
    RewardError,
    ServerBusyError,
    ServerError,
    ServerUnreachableError,
    missing_extra,
)
from unbroken.ledger.numbers import MAX_FLOAT32
from unbroken.messages import get_text
from unbroken.runs.prompts.rewards import check_retries

try:
    import httpx

    from unbroken.client.calls import RETRIED_STATUSES, Calls
except ImportError as error:
    raise missing_extra(error, "a judge needs the client extra", "client") from error

_PATH = "/chat/completions"
METRICS = ("judge/requests", "judge/cached", "judge/failed", "judge/seconds")
"""What it counts, in the metrics of a step."""
_FORMAT = 1
_LOCK_WAIT_S = 60.0
"""How long a process waits for another one that writes the cache."""
_SHOWN = 200
"""Characters of a reply or an error in a message."""


@dataclass(eq=False, slots=True)
class Judge:
    """A reward function that asks a model behind a URL. It may be called with any columns of a data set.

    With a `cache` the same request has one reply, the first that could be parsed, in all processes that share the file.
    It is sent once, but for processes that send it at the same time. What was asked counts against `max_requests` and
    `max_total_tokens`, all that the cache has seen, over restarts; without a cache, all that this object has. If
    nothing is left, a `RewardError` ends the run.

    Raises:
        InvalidInputError: a number is out of range, `url` is no address or has a secret in it, `api_key` cannot be
            sent, `prompt` has a brace that is not closed, or `cache` is another file.
    """

    url: str
    """What comes before `/chat/completions`; usually it ends in `/v1`."""
    model: str
    """Its name there."""
    _: KW_ONLY
    prompt: str | Callable[[Mapping[str, Any]], str]
    """What the judge reads, with `{prompt}`, `{completion}` and `{COLUMN}` of the data set in braces; or a function of
    these by name that returns it."""
    parse: Callable[[str], float | None] = float
    """Gives the reward of a reply, or None for no opinion; a `ValueError` makes it a bad reply. By default the whole
    reply is a number."""
    options: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0})
    """Other fields of the request; by default only a temperature of 0."""
    api_key: str | None = field(default=None, repr=False)
    """Sent as a bearer token."""
    cache: str | Path | None = None
    """A file of replies, made if it is not there. None: none is kept."""
    max_requests: int | None = None
    """How many may be sent; one that is sent again to a server that is full or not there counts once. None: no limit.
    """
    max_total_tokens: int | None = None
    """Of `usage.total_tokens` of the replies: nothing is sent once so many are used."""
    max_concurrent: int = 8
    """Requests in flight at a time, of all prompts."""
    max_retries: int = 3
    """How often a request is sent again after an error of the server, or a reply that does not parse."""
    retry_wait_s: float = 1.0
    """Wait before the first of these; it doubles each time."""
    timeout_s: float = 120.0
    """For an answer."""
    _write: Callable[[Mapping[str, Any]], str] = field(init=False, repr=False)
    _store: _Store = field(init=False, repr=False)
    _in_flight: WeakKeyDictionary[asyncio.AbstractEventLoop, _InFlight] = field(
        init=False, repr=False, default_factory=WeakKeyDictionary
    )

    def __post_init__(self) -> None:
        for name, value in (
            ("max_requests", self.max_requests),
            ("max_total_tokens", self.max_total_tokens),
            ("max_concurrent", self.max_concurrent),
        ):
            _check_positive(name, value)
        check_retries(self.max_retries, retry_wait_s=self.retry_wait_s, timeout_s=self.timeout_s)
        self.url = _check_url(self.url)
        _check_key(self.api_key)
        self._write = _make_writer(self.prompt) if isinstance(self.prompt, str) else self.prompt
        self._store = _Store(self.cache, max_requests=self.max_requests, max_total_tokens=self.max_total_tokens)

    async def __call__(self, completions: Sequence[Any], prompts: Sequence[Any], **columns: Any) -> list[float | None]:
        """The reward of each completion; raises `RewardError` as the class says, or if a request failed each time."""
        for metric in METRICS:
            add_cost(metric, 0)
        texts = []
        for k, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            values = {name: of_column[k] for name, of_column in columns.items()}
            texts.append(self._write({**values, "prompt": prompt, "completion": completion}))
        calls = Calls(
            self.url,
            api_key=self.api_key,
            timeout_s=self.timeout_s,
            connect_timeout_s=self.timeout_s,
            max_retries=self.max_retries,
            # Without TLS no certificates are read.
            transport=httpx.AsyncHTTPTransport(verify=self.url.startswith("https:")),
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                asked = {text: tasks.create_task(self._score(calls, text)) for text in dict.fromkeys(texts)}
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed.exceptions[0].__cause__
        finally:
            await calls.close()
        return [asked[text].result() for text in texts]

    async def _score(self, calls: Calls, text: str) -> float | None:
        body = {"model": self.model, **self.options, "messages": [{"role": "user", "content": text}]}
        request = json.dumps([self.url, body], sort_keys=True)
        digest = hashlib.sha256(request.encode("utf-8", "surrogatepass")).hexdigest()
        loop = asyncio.get_running_loop()
        in_flight = self._in_flight.setdefault(loop, _InFlight(self.max_concurrent))
        # Another prompt may ask the same now. It is waited for before a slot is taken, which it may need.
        async with nullcontext() if self.cache is None else in_flight.lock(digest), in_flight.slots:
            found = await asyncio.to_thread(self._store.find, digest)
            if found is not None:
                try:
                    score = self._read_score(found)
                except _BadReplyError:
                    pass  # `parse` has changed since it was kept
                else:
                    add_cost("judge/cached", 1)
                    return score
            reply, score = await self._ask(calls, body)
            kept = await asyncio.to_thread(self._store.keep, digest, reply, instead_of=found)
            # Another process may have been faster; a run that continues will read its reply.
            return score if kept == reply else self._read_score(kept)

    async def _ask(self, calls: Calls, body: Mapping[str, Any]) -> tuple[str, float | None]:
        """A reply that could be parsed, and its score."""
        for retry in range(self.max_retries + 1):
            await asyncio.to_thread(self._store.spend)
            add_cost("judge/requests", 1)
            started = time.perf_counter()
            try:
                answer = await calls.post_again(_PATH, body)
                await asyncio.to_thread(self._store.add_tokens, self._read_usage(answer))
                reply = _read_reply(answer)
                return reply, self._read_score(reply)
            except (ServerError, _BadReplyError) as error:
                add_cost("judge/failed", 1)
                if not _may_help(error):
                    raise RewardError(f"the judge {self.url} failed: {self._hide_key(error)}") from None
                if retry == self.max_retries:
                    raise RewardError(
                        f"the judge {self.url} failed at try {retry + 1}: {self._hide_key(error)}"
                    ) from None
            except RewardError:
                raise
            except InvalidInputError as error:  # a request that is refused is refused again
                add_cost("judge/failed", 1)
                raise RewardError(f"the judge {self.url} refuses the request: {self._hide_key(error)}") from None
            finally:
                add_cost("judge/seconds", time.perf_counter() - started)
            await asyncio.sleep(self.retry_wait_s * 2**retry)
        raise AssertionError("unreachable")

    def _hide_key(self, error: Exception) -> str:
        """An error's text without the key, which servers repeat to say that they do not know it."""
        return str(error) if self.api_key is None else str(error).replace(self.api_key, "***")

    def _read_usage(self, answer: Any) -> int:
        """The tokens of an answer, 0 if nobody counts them."""
        usage = answer.get("usage") if isinstance(answer, dict) else None
        tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
        if type(tokens) is int and tokens >= 0:
            return tokens
        if self.max_total_tokens is not None:
            raise RewardError(
                f"the judge {self.url} must answer with usage.total_tokens, by which max_total_tokens is kept, got "
                f"{str(usage)[:_SHOWN]}"
            )
        return 0

    def _read_score(self, reply: str) -> float | None:
        try:
            score = self.parse(reply)
        except ValueError as error:
            raise _BadReplyError(f"the reply {reply[:_SHOWN]!r} does not parse: {error}") from None
        # As rewards must be: otherwise the reply would be kept, and end each run that finds it.
        if score is not None and not abs(score) <= MAX_FLOAT32:
            raise _BadReplyError(f"the reply {reply[:_SHOWN]!r} must give a finite number, got {score}")
        return score


class _InFlight:
    """What an event loop asks at the moment."""

    def __init__(self, max_concurrent: int) -> None:
        self.slots = asyncio.Semaphore(max_concurrent)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def lock(self, digest: str) -> asyncio.Lock:
        """Whoever has it asks; the others find the reply."""
        return self._locks.setdefault(digest, asyncio.Lock())


class _BadReplyError(RewardError):
    """A reply without a score."""


def _may_help(error: Exception) -> bool:
    """Whether to send a request again, after `Calls` has done so for full queues and connections that failed."""
    if isinstance(error, ServerUnreachableError):
        return isinstance(error.__cause__, httpx.ReadTimeout)
    status = error.status if isinstance(error, ServerError) else None
    if isinstance(error, ServerBusyError) or status in RETRIED_STATUSES:
        return False
    # A wrong key or another address stays wrong; 408: the server had waited too long for the request.
    return status is None or status >= 500 or status == 408


def _read_reply(answer: Any) -> str:
    """The text of a chat completion. One that was cut is none: a number may have lost its end."""
    try:
        choice = answer["choices"][0]
        content, reason = choice["message"]["content"], choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError):
        content, reason = None, None
    if not isinstance(content, str):
        raise _BadReplyError(f"the answer must be a chat completion with a text, got {str(answer)[:_SHOWN]!r}")
    if reason == "length":
        raise _BadReplyError(f"the reply {content[-_SHOWN:]!r} was cut: give options a greater max_tokens")
    if any("\ud800" <= each <= "\udfff" for each in content):  # JSON may hold it, files of text may not
        raise _BadReplyError(f"the reply {content[:_SHOWN]!r} has half a character (a surrogate without the other)")
    return content


def _check_url(url: str) -> str:
    """The address as requests need it; a secret in it would be in each error."""
    try:
        read = httpx.URL(url)
    except httpx.InvalidURL:
        read = httpx.URL()
    if read.scheme not in ("http", "https") or not read.host or read.userinfo or read.query or read.fragment:
        shown = "another" if read.userinfo or read.query else repr(url)
        raise InvalidInputError(
            f"url must be http://HOST/... or https://HOST/..., without a user, ? and #, got {shown}: a key is api_key"
        )
    return str(read).rstrip("/")


def _check_positive(name: str, value: int | None) -> None:
    """Refuse text of `os.environ`, and halves: half a slot would never be taken."""
    if value is not None and type(value) is not int:
        raise InvalidInputError(f"{name} must be a whole number, got {value!r}")
    if value is not None and value < 1:
        raise InvalidInputError(f"{name} must be a number >= 1, got {value}")


def _check_key(api_key: str | None) -> None:
    """Refuse what httpx refuses at each request, with an error that shows the key."""
    if api_key is None:
        return
    if not (api_key and api_key.isascii() and api_key.isprintable() and api_key == api_key.strip()):
        raise InvalidInputError(
            "api_key must be None, or printable ASCII without spaces around it: it is sent in a header"
        )


def _make_writer(template: str) -> Callable[[Mapping[str, Any]], str]:
    """What fills in the names in braces."""
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise InvalidInputError(f"prompt must have names in braces, and other braces twice: {error}") from None

    def write(values: Mapping[str, Any]) -> str:
        if unknown := sorted(names - values.keys()):
            raise RewardError(f"prompt must name {', '.join(sorted(values))} in braces, got {', '.join(unknown)}")
        return template.format_map({name: _to_text(values[name]) for name in names})

    return write


def _to_text(value: Any) -> str:
    """A value as the judge reads it: of messages a paragraph each."""
    if (
        isinstance(value, (list, tuple))
        and value
        and all(isinstance(each, Mapping) and "role" in each for each in value)
    ):
        return "\n\n".join(f"{each['role']}: {get_text(each.get('content'))}" for each in value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


class _Store:
    """Replies by the digest of their request, and what was spent, in a file of SQLite or in memory.

    Its calls are short, and wait for other processes; callers make them in a thread.
    """

    def __init__(self, path: str | Path | None, *, max_requests: int | None, max_total_tokens: int | None) -> None:
        self._path = path
        self._limits = {"max_requests": max_requests, "max_total_tokens": max_total_tokens}
        self._lock = threading.Lock()
        place = ":memory:" if path is None else str(path)
        try:
            self._database = sqlite3.connect(place, timeout=_LOCK_WAIT_S, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise InvalidInputError(f"cache must be a file that can be written, got {path}: {error}") from None
        try:
            self._create()
        except sqlite3.Error as error:
            self._database.close()
            raise InvalidInputError(f"cache must be a judge's cache, or not exist yet, got {path}: {error}") from None

    def _create(self) -> None:
        self._run("BEGIN IMMEDIATE")  # two processes may create it
        ((found,),) = self._run("PRAGMA user_version")
        tables = {name for (name,) in self._run("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if found not in (0, _FORMAT) or (found == 0 and tables):
            raise sqlite3.DatabaseError(f"it is another database, with the version {found}")
        self._run("CREATE TABLE IF NOT EXISTS replies (digest TEXT PRIMARY KEY, reply TEXT NOT NULL)")
        self._run("CREATE TABLE IF NOT EXISTS spent (one INTEGER PRIMARY KEY, requests INTEGER, tokens INTEGER)")
        self._run("INSERT OR IGNORE INTO spent VALUES (1, 0, 0)")
        self._run(f"PRAGMA user_version = {_FORMAT}")
        self._run("COMMIT")

    def _run(self, statement: str, *values: Any) -> list[Any]:
        with self._lock, closing(self._database.execute(statement, values)) as cursor:
            return cursor.fetchall()

    def find(self, digest: str) -> str | None:
        """The reply to a request that was answered."""
        found = self._run("SELECT reply FROM replies WHERE digest = ?", digest)
        return str(found[0][0]) if found else None

    def keep(self, digest: str, reply: str, *, instead_of: str | None) -> str:
        """Keep a reply, if there is a file, where there is none or that one; returns the one that is kept."""
        if self._path is None:
            return reply
        self._run(
            "INSERT INTO replies VALUES (?1, ?2) ON CONFLICT (digest) DO UPDATE SET reply = ?2 WHERE reply IS ?3",
            digest,
            reply,
            instead_of,
        )
        return self.find(digest) or reply

    def spend(self) -> None:
        """Count a request before it is sent; raises `RewardError` if the budget is spent."""
        requests, tokens = self._limits.values()
        changed = self._run(
            "UPDATE spent SET requests = requests + 1 WHERE (?1 IS NULL OR requests < ?1) "
            "AND (?2 IS NULL OR tokens < ?2) RETURNING requests",
            requests,
            tokens,
        )
        if changed:
            return
        ((made, used),) = self._run("SELECT requests, tokens FROM spent")
        where = "this process" if self._path is None else str(self._path)
        limits = " and ".join(f"{name} {limit}" for name, limit in self._limits.items() if limit is not None)
        raise RewardError(
            f"the judge's budget is spent: {where} has sent {made} requests, of {used} tokens, with {limits}. Give "
            "more; if that changes a file, the same command says how the run goes on"
        )

    def add_tokens(self, number: int) -> None:
        """Count the tokens of an answer."""
        self._run("UPDATE spent SET tokens = tokens + ?", number)
