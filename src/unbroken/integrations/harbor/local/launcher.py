"""The first program in a task's sandbox: it sets limits, opens the way to the gateway, and becomes the command.

It is run from its text, by a Python without packages, and imports nothing of ours. Its arguments are a JSON object and
the words of the command:

    control         the number of a UNIX socket to whoever started it
    port            open a server on this port of the sandbox's loopback, and pass its socket back; none: 0
    file_bytes      limit of each file that is written; none: 0
    memory_bytes    limit of each process's address space; none: 0

On the socket comes `S`, with the server's socket if one was asked for; then `E` and why, if the command cannot be
started.
"""

import json
import os
import resource
import socket
import sys


def main() -> None:
    """Become the command; if that fails, say why and exit with 127."""
    settings = json.loads(sys.argv[1])
    words = sys.argv[2:]
    os.set_inheritable(settings["control"], False)
    control = socket.socket(fileno=settings["control"])
    try:
        if settings["port"]:
            with socket.create_server(("127.0.0.1", settings["port"])) as server:
                socket.send_fds(control, [b"S"], [server.fileno()])
        else:
            control.send(b"S")
        _limit(resource.RLIMIT_CORE, 0)
        if settings["file_bytes"]:
            _limit(resource.RLIMIT_FSIZE, settings["file_bytes"])
        if settings["memory_bytes"]:
            _limit(resource.RLIMIT_AS, settings["memory_bytes"])
        os.execvp(words[0], words)
    except OSError as error:
        control.send(b"E" + f"{words[0]}: {error.strerror}".encode())
        sys.exit(127)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


if __name__ == "__main__":
    main()
