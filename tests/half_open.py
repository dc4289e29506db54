"""
Links that die silently.

`SilentProxy` forwards until `silence` is called: its system continues acknowledging, as that of a proxy or VPN does.  `Wire` is a
pair of network interfaces between this machine and a network namespace, on which packets are lost for real, in one direction
or both; what happens then is up to the kernels of both ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

T = TypeVar("T")

CLONE_NEWNET = 0x40000000
NOBODY = "02:00:00:00:00:99"


class SilentProxy:
    """A proxy on loopback; `silence` stops what the server says."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._silent = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [client, server]
                for one, other, drops in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pump, args=(one, other, drops), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, drops: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not (drops and self._silent.is_set()):
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)

    def silence(self, on: bool = True) -> None:
        """Also for connections that are made meanwhile."""
        self._silent.set() if on else self._silent.clear()

    def close(self) -> None:
        for each in (self._listener, *self._sockets):
            each.close()


@contextlib.contextmanager
def silent_proxy(port: int) -> Iterator[SilentProxy]:
    proxy = SilentProxy(port)
    try:
        yield proxy
    finally:
        proxy.close()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def _lost(address: str, device: str, *where: str) -> Iterator[None]:
    neighbour = (*where, "neigh")
    ip(*neighbour, "replace", address, "lladdr", NOBODY, "dev", device, "nud", "permanent")
    try:
        yield
    finally:
        ip(*neighbour, "del", address, "dev", device)


class Wire:
    """A line between `here`, the address of this machine, and `there`, where `run` runs what it is given."""

    def __init__(self, number: int) -> None:
        self.name = f"aqwire{number}"
        self.here, self.there = (f"10.231.{number % 250}.{host}" for host in (1, 2))
        self._ends = (f"aqh{number}", f"aqt{number}")

    def make(self) -> None:
        ip("netns", "add", self.name)
        ip("link", "add", self._ends[0], "type", "veth", "peer", "name", self._ends[1], "netns", self.name)
        ip("addr", "add", f"{self.here}/24", "dev", self._ends[0])
        ip("link", "set", self._ends[0], "up")
        ip("-n", self.name, "addr", "add", f"{self.there}/24", "dev", self._ends[1])
        ip("-n", self.name, "link", "set", self._ends[1], "up")

    def remove(self) -> None:
        for command in (("link", "del", self._ends[0]), ("netns", "del", self.name)):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip(*command)

    @contextlib.contextmanager
    def losing_what_goes_there(self) -> Iterator[None]:
        """Packets from here go to a machine that does not exist."""
        with _lost(self.there, self._ends[0]):
            yield

    @contextlib.contextmanager
    def losing_what_comes_from_there(self) -> Iterator[None]:
        with _lost(self.here, self._ends[1], "-n", self.name):
            yield

    def run(self, work: Callable[[], T]) -> T:
        """In a thread that is there, as are the threads and connections that it makes."""
        results: list[T] = []
        failures: list[BaseException] = []

        def there() -> None:
            try:
                namespace = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(namespace, CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
                os.close(namespace)
                results.append(work())
            except BaseException as exc:  # noqa: BLE001 - raised in the test's thread
                failures.append(exc)

        thread = threading.Thread(target=there)
        thread.start()
        thread.join()
        for failure in failures:
            raise failure
        return results[0]


@contextlib.contextmanager
def wire(number: int) -> Iterator[Wire]:
    """Skips the test where network namespaces may not be made."""
    made = Wire(number)
    try:
        made.make()
    except (OSError, subprocess.CalledProcessError) as exc:
        made.remove()
        pytest.skip(f"no network namespace can be made here: {exc}")
    try:
        yield made
    finally:
        made.remove()
