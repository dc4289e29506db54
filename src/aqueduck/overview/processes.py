"""The processes of a service: memory and processor time of the driver, the JVM and the Python workers."""

from __future__ import annotations

from collections.abc import Iterator

import psutil

from aqueduck.overview.values import ProcessUsage

__all__ = ["SLOW_SECONDS", "processes"]

SLOW_SECONDS = 15.0
"""How often an overview refreshes values that take longer to read than its own, such as these."""


def processes() -> Iterator[ProcessUsage]:
    """The driver, the JVM below it, and the Python processes below the JVM."""
    driver = psutil.Process()
    memory = {"driver": 0, "jvm": 0, "workers": 0}
    cpu = dict.fromkeys(memory, 0.0)
    for process in (driver, *driver.children(recursive=True)):
        try:
            with process.oneshot():
                kind = "driver" if process == driver else "jvm" if "java" in process.name() else "workers"
                used = process.cpu_times()
                memory[kind] += process.memory_info().rss
                cpu[kind] += used.user + used.system
        except psutil.Error:
            continue  # it ended meanwhile
    for name, size in memory.items():
        if size:
            yield ProcessUsage(name=name, memory_bytes=size, cpu_seconds=round(cpu[name], 2))
