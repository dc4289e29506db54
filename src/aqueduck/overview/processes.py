"""The processes of a service: how much memory and processor time the driver, the JVM and the Python workers use."""

from __future__ import annotations

from collections.abc import Iterator

import psutil

from aqueduck.overview.values import ProcessUsage

__all__ = ["SLOW_SECONDS", "processes"]

SLOW_SECONDS = 15.0
"""How often an overview looks at what takes longer than reading its own values, such as this."""


def processes() -> Iterator[ProcessUsage]:
    """The driver, the JVM below it, and the Python processes below that."""
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
