"""Environments of the package verifiers, in the version that is installed, each attempt in a session of a gateway.

For users: docs/environments.md.
"""

from __future__ import annotations

import functools
import importlib
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from unbroken.errors import InvalidInputError
from unbroken.rollout.agents.session import TaskEnvironment

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def load_environment(name: str, arguments: Mapping[str, Any]) -> TaskEnvironment:
    """Load the environment that verifiers knows by `name`.

    With verifiers 0.1 `arguments` are those of its `load_environment`, or the name is that of a class of the package
    itself, such as ReasoningGymEnv, and they are those of the class. With 0.4 the name is that of a taskset, and they
    are the fields of the environment's config, such as `taskset`, `agent` or `timeout`.

    Raises:
        InvalidInputError: verifiers is not installed, there is no such environment, its arguments are wrong, or it
            cannot be trained on.
    """
    package = _import_verifiers()
    try:
        with _kept_signals():
            if hasattr(package, "load_environment"):
                from unbroken.integrations.verifiers.classic import ClassicEnvironment

                make = _find_class(package, name) or functools.partial(package.load_environment, name)
                return ClassicEnvironment(make(**arguments), name=name)
            from unbroken.integrations.verifiers.tasksets import TasksetEnvironment

            return TasksetEnvironment.load(name, arguments)
    except InvalidInputError:
        raise
    except Exception as error:  # the environment's own code may raise anything
        raise InvalidInputError(
            f"environment must be one that verifiers {package.__version__} can load, got {name!r}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _find_class(package: Any, name: str) -> type | None:
    """The environment of the package itself, if it has one of this name; others are packages."""
    # The name is the user's, and the package may have nothing of that name.
    found = getattr(package, name, None) if name.isidentifier() else None
    return found if isinstance(found, type) and issubclass(found, package.Environment) else None


def _import_verifiers() -> Any:
    try:
        return importlib.import_module("verifiers")
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            "environments of verifiers need the package verifiers, which an environment's own package asks for: "
            f"pip install 'verifiers==0.1.14', or 'verifiers>=0.4,<0.5' ({error})"
        ) from None


@contextmanager
def _kept_signals() -> Iterator[None]:
    """Undo what verifiers 0.1 does when it makes an environment: it ends the process at SIGTERM by itself, so that
    the run could not close its engine and its files.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
