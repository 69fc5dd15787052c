"""Pulse: whether a node still answers, long before Ray has made up its mind.

Ray takes 13 s to notice that a node was killed and 64 s for one that is frozen (2.60); until then
it places actors there, which do not start. Its daemon on the node, the raylet, is a gRPC server: to
a client's first words (the preface of HTTP/2) it has an answer, which takes a millisecond and needs
no process, no resources, nor a token. With TLS it complains, which is an answer, too.
"""

from __future__ import annotations

import socket

_PATIENCE = 2.0
"""Seconds for the answer."""

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_NO_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


def answers(address: tuple[str, int]) -> bool:
    """Whether somebody at host and port reacts."""
    try:
        with socket.create_connection(address, _PATIENCE) as connection:
            try:
                connection.sendall(_PREFACE + _NO_SETTINGS)
                connection.recv(1)
            except ConnectionError:
                pass  # it does not want to hear that, so it has heard it
    except OSError:  # refused, no way there, or silence
        return False
    return True
