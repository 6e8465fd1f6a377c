"""A rank that dies ends the run: on every rank, within seconds, whatever the others wait for.

Agreements between hosts fail when a rank's sockets close, but a rank that waits for its GPU, which
waits for the dead one's, waits until the backend's timeout. So every rank keeps one more connection,
to rank 0, and a thread looks at it. When one closes without a goodbye, rank 0 tells the others; each
has `GRACE_S` to end by itself (with its own message, and its locks released), and is ended then. What
was saved stays: a checkpoint is on the disk whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

GRACE_S = 10.0
_CONNECT_S = 60.0
_BYE, _LOST = b"bye\n", b"lost "
# a machine that went dark closes nothing: after 10 + 3 x 5 s without an answer it counts as lost
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class Watch:
    """See the module docstring. Built by all ranks at once; `on_main`: as a Strategy's.

    Raises OSError where rank 0 cannot be reached under MASTER_ADDR.
    """

    def __init__(self, rank: int, world: int, on_main: Callable[..., Any]) -> None:
        self.rank = rank
        self._done = threading.Event()
        self._peers: dict[socket.socket, int] = {}  # connection -> the rank at its other end
        server = socket.create_server(("", 0), backlog=world) if rank == 0 else None
        port, token = on_main(lambda: (server.getsockname()[1], secrets.token_hex(16)))
        if server is not None:
            with server:
                server.settimeout(_CONNECT_S)
                while len(self._peers) < world - 1:
                    self._accept(server, token)
        else:
            address = os.environ["MASTER_ADDR"], port
            peer = socket.create_connection(address, timeout=_CONNECT_S)
            peer.sendall(f"{token} {rank}\n".encode())
            self._peers[peer] = 0
        for peer in self._peers:
            peer.settimeout(None)
            _keep_alive(peer)
        threading.Thread(target=self._look, name="ottava-watch", daemon=True).start()

    def _accept(self, server: socket.socket, token: str) -> None:
        peer, _ = server.accept()
        peer.settimeout(_CONNECT_S)
        said, _, number = _line(peer).partition(" ")
        if said == token:
            self._peers[peer] = int(number)
        else:  # somebody else's
            peer.close()

    def goodbye(self) -> None:
        """This rank is about to end in order."""
        for peer in list(self._peers):
            _send(peer, _BYE)

    def close(self) -> None:
        """This rank has ended in order, all but its interpreter."""
        self._done.set()

    def _look(self) -> None:
        with selectors.DefaultSelector() as selector:
            for peer in self._peers:
                selector.register(peer, selectors.EVENT_READ)
            while selector.get_map() and not self._done.is_set():
                for key, _ in selector.select(timeout=1.0):
                    text = _receive(key.fileobj)
                    if text.startswith(_LOST):
                        return self._end(int(text.split()[1]))
                    if not text:
                        return self._end(self._peers[key.fileobj])
                    selector.unregister(key.fileobj)  # it said goodbye

    def _end(self, lost: int) -> None:
        if self.rank == 0:
            for peer, rank in self._peers.items():
                if rank != lost:
                    _send(peer, _LOST + f"{lost}\n".encode())
        if self._done.wait(GRACE_S):
            return
        message = (
            f"ottava: rank {self.rank}: lost rank {lost}, see its own message; ended after "
            f"{GRACE_S:g} s, the same command continues from the newest checkpoint\n"
        )
        sys.stderr.write(message)
        sys.stderr.flush()
        os._exit(1)


def _send(peer: socket.socket, text: bytes) -> None:
    with contextlib.suppress(OSError):  # it is gone: there is nobody to tell
        peer.sendall(text)


def _line(peer: socket.socket) -> str:
    line = b""
    while not line.endswith(b"\n") and (byte := _receive(peer, 1)):
        line += byte
    return line.decode(errors="replace").strip()


def _receive(peer: socket.socket, size: int = 64) -> bytes:
    try:
        return peer.recv(size)
    except OSError:
        return b""


def _keep_alive(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
