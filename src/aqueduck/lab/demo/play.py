"""The order of what happens in a demo, the same for each flow."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from rich.console import RenderableType

from aqueduck.lab.demo.screen import Act, Count, Screen
from aqueduck.lab.demo.service_process import ServiceProcess, page_port

__all__ = ["Demo", "Flow", "Load", "play"]

Flow = dict[str, Any]
"""A flow as the service's API shows it."""


class Load(Protocol):
    """A thread that changes the source until it is stopped."""

    failure: BaseException | None

    def start(self) -> None: ...

    def stop(self) -> None: ...


class Demo(Protocol):
    """What differs between the flows."""

    source: str
    """The source in a few words."""
    names: tuple[str, str]
    """What the columns of the comparison are called: the source and its copy."""
    advice: tuple[str, ...]
    """What to do next."""

    def prepare(self, directory: Path, port: int, stack: contextlib.ExitStack) -> Path:
        """Create the source and the configuration file."""

    def load(self) -> Load:
        """What changes the source."""

    def runs(self, flow: Flow) -> bool:
        """Whether the flow does its normal work."""

    def act(self) -> str:
        """Do something unusual in the middle of the load, and say what."""

    def view(self, flow: Flow | None) -> RenderableType:
        """Both sides as the demo itself sees them; called once a second."""

    def line(self, flow: Flow | None) -> str:
        """The load and the delay, in a few words."""

    def last_change(self) -> Callable[[Flow], bool]:
        """Make a last change; the answer is whether everything has arrived."""

    def look_back(self, screen: Screen, ended: float) -> None:
        """Show what else can be done with the result, with the time when the load ended."""

    def counts(self) -> Iterable[Count]:
        """Compare both sides."""


def play(demo: Demo, screen: Screen, *, seconds: float, kill: bool, keep: bool) -> bool:
    """Play a demo to its end; returns whether both sides are identical."""
    with _directory(keep) as directory, contextlib.ExitStack() as stack:
        screen.step(f"creating {demo.source} …")
        port = page_port()
        service = ServiceProcess(demo.prepare(directory, port, stack), port)
        stack.callback(service.stop)
        screen.step("starting the service, and waiting until the existing rows have arrived …")
        service.start()
        with screen.console.status("Spark starts …"):
            service.wait_until(demo.runs, "the normal work of the service")
        screen.page(service.address)
        screen.step(f"changing the source for {seconds:.0f} s, and looking at the copy every second\n")
        _busy(demo, screen, service, seconds, kill)
        screen.step("comparing both sides …")
        right = screen.compare(list(demo.counts()), names=demo.names)
        screen.wait_for_enter(service.address)
    screen.advise(demo.advice)
    if keep:
        screen.say(f"  • everything is kept in {directory}")
    return right


def _busy(demo: Demo, screen: Screen, service: ServiceProcess, seconds: float, kill: bool) -> None:
    """The load with everything that happens in it, until the last change has arrived."""
    load, picture = demo.load(), _Picture(demo, service)
    acts = [Act(0.2, demo.act)]
    if kill:
        acts.append(Act(0.4, lambda: _kill(service, picture)))
    load.start()
    try:
        screen.watch(seconds, picture.view, picture.line, acts, done=picture.runs)
    finally:
        load.stop()
    if load.failure is not None:
        raise load.failure
    ended = time.time()
    arrived = demo.last_change()
    with screen.console.status("no more changes; waiting until the last one has arrived …"):
        service.wait_until(arrived, "the last change")
    screen.say(f"the last change arrived {time.time() - ended:.1f} s after the load ended")
    demo.look_back(screen, ended)


def _kill(service: ServiceProcess, picture: _Picture) -> str:
    pid = service.kill()
    picture.flow = None
    service.start()
    return f"[bold]kill -9 {pid}[/]: the load continues, a new service starts"


class _Picture:
    """The view of a demo, made once a second."""

    def __init__(self, demo: Demo, service: ServiceProcess) -> None:
        self._demo = demo
        self._service = service
        self._made_at = 0.0
        self._view: RenderableType = ""
        self.flow: Flow | None = None

    def view(self) -> RenderableType:
        if time.monotonic() - self._made_at >= 1:
            self._made_at = time.monotonic()
            self.flow = self._service.flow()
            self._view = self._demo.view(self.flow)
        return self._view

    def line(self) -> str:
        return self._demo.line(self.flow)

    def runs(self) -> bool:
        return self.flow is not None and self._demo.runs(self.flow)


@contextlib.contextmanager
def _directory(keep: bool) -> Iterator[Path]:
    """A directory for everything that a demo writes, removed at the end, also after ctrl-C, unless it is kept."""
    directory = Path(tempfile.mkdtemp(prefix="aqueduck-demo-"))
    directory.chmod(0o711)  # the server may run as another user, who must be able to enter
    try:
        yield directory
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)
