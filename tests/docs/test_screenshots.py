"""
The pictures of the README show the page of the demo, light and dark.

`make screenshots` takes them anew.  It needs a Chromium; without one the test that takes them is skipped.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.reader import ROOT
from tests.fix_postgres import wait_until

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SIZE = {"width": 1280, "height": 800}
SCHEMES = ("light", "dark")


def dimensions(picture: Path) -> tuple[int, int]:
    """Width and height, from the header of a PNG."""
    header = picture.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:24])
    return width, height


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_readme_shows_the_page(scheme: str) -> None:
    """A picture for each colour scheme is there, and small enough to load."""
    picture = ROOT / "docs" / "img" / f"page-{scheme}.png"
    assert f'"docs/img/{picture.name}"' in (ROOT / "README.md").read_text(encoding="utf-8")
    assert dimensions(picture) == (SIZE["width"], SIZE["height"])
    assert picture.stat().st_size < 300_000


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_the_page_of_the_demo_is_photographed(tmp_path: Path) -> None:
    """The page of `aqueduck demo` while all tables stream; kept if AQUEDUCK_SCREENSHOTS names a directory."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    log = tmp_path / "log.txt"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with open(log, "wb") as out:
        demo = subprocess.Popen(
            [sys.executable, "-m", "aqueduck.cli", "demo", "--no-kill", "--seconds", "75"], env=env, stdout=out, stderr=out, cwd=tmp_path
        )  # fmt: skip
    try:
        wait_until(lambda: address(log) != "", "the demo has a page", 120, log=log.read_text)
        with playwright.sync_playwright() as driver:
            sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=sandbox)
            page = browser.new_page(viewport=SIZE)
            page.goto(address(log))
            expect = playwright.expect
            for table in ("customers", "orders", "order_items"):
                row = page.get_by_role("row").filter(has_text=f"public.{table}")
                expect(row).to_contain_text("streaming", timeout=120_000)
            expect(page.get_by_role("heading", level=1)).to_have_text("Everything flows", timeout=60_000)
            drawn = re.compile(".{300,}", re.DOTALL)  # the charts have something to show
            expect(page.locator(".chart-line").first).to_have_attribute("d", drawn, timeout=90_000)
            for scheme in SCHEMES:
                page.emulate_media(color_scheme=scheme)
                page.screenshot(path=tmp_path / f"page-{scheme}.png", animations="disabled")
            browser.close()
    finally:
        demo.send_signal(signal.SIGINT)
        demo.wait(timeout=60)
    pictures = [tmp_path / f"page-{scheme}.png" for scheme in SCHEMES]
    assert [dimensions(picture) for picture in pictures] == [(SIZE["width"], SIZE["height"])] * 2
    assert pictures[0].read_bytes() != pictures[1].read_bytes()
    if kept := os.environ.get("AQUEDUCK_SCREENSHOTS"):
        for picture in pictures:
            shutil.copy(picture, ROOT / kept)


def address(log: Path) -> str:
    """Where the demo says that its page is."""
    found = re.search(r"while the demo runs: (\S+)", log.read_text())
    return found[1] if found else ""
