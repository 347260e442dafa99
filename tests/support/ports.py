"""Ports for jobs of tests: below those that the system hands out to connections, which take a freed one at once."""

import itertools
import os
import socket

_FIRST, _COUNT = 20000, 12000
_next = itertools.count(os.getpid() * 37)


def free_port() -> int:
    """A port that nobody listens on, another one at every call of this process."""
    while True:
        port = _FIRST + next(_next) % _COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
