"""A TCP proxy for many connections that can be told to cut them, at once or at a byte.

It runs in a process of its own: libpq may hold our interpreter's lock. It obeys lines on its
standard input, answers each with a line, and ends when that input ends.

    arm N one|all   reset the connection over which the n-th byte from now goes, or all of them
    disarm          let everything pass again
    armed           whether the byte is still to come: True or False
    cut             reset all connections now
    count           the bytes passed so far, in both directions
"""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
import sys
from pathlib import Path

# Linger for zero seconds: close sends RST.
_RESET = struct.pack("ii", 1, 0)


class Proxy:
    """The proxy's process, seen from the campaign."""

    def __init__(self, port: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", Path(__file__), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self._answer())

    def arm(self, after_bytes: int, *, every: bool) -> None:
        self._ask(f"arm {after_bytes} {'all' if every else 'one'}")

    def disarm(self) -> None:
        self._ask("disarm")

    def is_armed(self) -> bool:
        return self._ask("armed") == "True"

    def cut(self) -> None:
        self._ask("cut")

    def passed_bytes(self) -> int:
        return int(self._ask("count"))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _ask(self, command: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class _Server:
    """The proxy itself."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._links: set[tuple[socket.socket, socket.socket]] = set()
        self._passed = 0
        self._left: int | None = None
        self._every = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        listener = socket.create_server(("127.0.0.1", 0), backlog=200)
        listener.setblocking(False)
        commands = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
        self._say(listener.getsockname()[1])
        accepting = asyncio.create_task(self._accept(listener))
        while line := await commands.readline():
            self._obey(line.decode().split())
        accepting.cancel()

    def _obey(self, words: list[str]) -> None:
        if words[0] == "arm":
            self._left, self._every = int(words[1]), words[2] == "all"
        elif words[0] == "cut":
            self._cut(list(self._links))
        elif words[0] == "disarm":
            self._left = None
        self._say(self._left is not None if words[0] == "armed" else self._passed)

    def _say(self, value: object) -> None:
        sys.stdout.write(f"{value}\n")
        sys.stdout.flush()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(listener)
            self._start(self._connect(client))

    def _start(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, client: socket.socket) -> None:
        server = socket.socket()
        for end in (client, server):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = (client, server)
        try:
            address = ("127.0.0.1", self._port)
            await asyncio.get_running_loop().sock_connect(server, address)
        except OSError:
            self._cut([link])
            return
        self._links.add(link)
        self._start(self._pass_on(link, client, server))
        self._start(self._pass_on(link, server, client))

    async def _pass_on(
        self, link: tuple[socket.socket, socket.socket], end: socket.socket, other: socket.socket
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            while data := await loop.sock_recv(end, 65536):
                allowed = self._count(len(data))
                await loop.sock_sendall(other, data[:allowed])
                if allowed < len(data):
                    self._cut(list(self._links) if self._every else [link])
                    return
        except OSError:
            pass
        if link in self._links:
            self._links.discard(link)
            for one in link:
                _forget(one)
                one.close()

    def _count(self, size: int) -> int:
        """How many of these bytes may pass."""
        self._passed += size
        if self._left is None:
            return size
        if self._left < size:
            allowed, self._left = self._left, None
            return allowed
        self._left -= size
        return size

    def _cut(self, links: list[tuple[socket.socket, socket.socket]]) -> None:
        for link in links:
            self._links.discard(link)
            for end in link:
                if end.fileno() < 0:
                    continue
                _forget(end)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.close()


def _forget(end: socket.socket) -> None:
    """Nobody waits for this socket any more: its number may soon be another's."""
    loop = asyncio.get_running_loop()
    if end.fileno() >= 0:
        loop.remove_reader(end.fileno())
        loop.remove_writer(end.fileno())


if __name__ == "__main__":
    asyncio.run(_Server(int(sys.argv[1])).serve())
