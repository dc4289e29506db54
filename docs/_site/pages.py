"""
Put the pages of the site together: `python docs/_site/pages.py build`, then `zensical build -f build/mkdocs.yml`.

docs/ is copied to build/docs, README.md becomes the first page, and docs/adr gets an index.  CHANGELOG.md,
CONTRIBUTING.md, SECURITY.md and examples/ come along.  Links are written for people who read the repository, relative
to each file; here they are turned so that they fit the site.  A page that the navigation of mkdocs.yml does not have,
and a missing page, end it with an error; the generator checks links, in its strict mode.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
SOURCES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "LICENSE",
    "docs/*.md",
    "docs/tutorials/*.md",
    "docs/how-to/*.md",
    "docs/adr/*.md",
    "docs/img/*",
    "docs/schema/*",
    "examples/*",
    "examples/*/*",
)
LINK = re.compile(r"""(\]\(|src(?:set)?=")([^)"\s:#]+)((?:#[^)]*)?[)"])""")


def sources() -> list[str]:
    """The files of the site, as paths in the repository."""
    found = (path for pattern in SOURCES for path in sorted(ROOT.glob(pattern)))
    return [path.relative_to(ROOT).as_posix() for path in found if path.is_file() and path.suffix != ".pyc"]


def site_path(repository_path: str) -> str:
    """Where a file of the repository is in the site; a directory is its index."""
    if (ROOT / repository_path).is_dir():
        repository_path = posixpath.join(repository_path, "README.md")
    path = repository_path.removeprefix("docs/")
    return path.removesuffix("README.md") + "index.md" if path.endswith("README.md") else path


def turned(markdown: str, repository_path: str) -> str:
    """The text of a page with links that fit the site."""
    here = posixpath.dirname(site_path(repository_path)) or "."

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(repository_path), found[2]))
        return f"{found[1]}{posixpath.relpath(site_path(target), here)}{found[3]}"

    return LINK.sub(link, markdown)


def decisions() -> list[tuple[str, str]]:
    """Title and page of each ADR."""
    paths = sorted((ROOT / "docs" / "adr").glob("0*.md"))
    return [
        (p.read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("# "), f"adr/{p.name}") for p in paths
    ]


def configuration() -> dict[str, Any]:
    """`mkdocs.yml` with the decisions in its navigation."""
    config: dict[str, Any] = yaml.safe_load(
        (Path(__file__).parent / "mkdocs.yml").read_text(encoding="utf-8")
    )
    sections = [pages for item in config["nav"] for pages in item.values() if isinstance(pages, list)]
    [entry] = [page for pages in sections for page in pages if "Decisions" in page]
    entry["Decisions"] = ["adr/index.md", *({title: page} for title, page in decisions())]
    return config


def navigated(nav: Any) -> Iterator[str]:
    """The pages of a navigation."""
    if isinstance(nav, str):
        yield nav
        return
    for item in nav.values() if isinstance(nav, dict) else nav:
        yield from navigated(item)


def missing(config: dict[str, Any]) -> list[str]:
    """What is wrong with the navigation."""
    wanted = list(navigated(config["nav"]))
    pages = {site_path(path) for path in sources() if path.endswith(".md")} | {"adr/index.md"}
    unknown = [f"{page}: in the navigation, but not there" for page in wanted if page not in pages]
    return unknown + [f"{page}: not in the navigation" for page in sorted(pages - set(wanted))]


def assemble(build: Path) -> None:
    config = configuration()
    if problems := missing(config):
        sys.exit("\n".join(problems))
    shutil.rmtree(build / "docs", ignore_errors=True)
    for path in sources():
        target = build / "docs" / site_path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.endswith(".md"):
            target.write_text(turned((ROOT / path).read_text(encoding="utf-8"), path), encoding="utf-8")
        else:
            shutil.copyfile(ROOT / path, target)
    lines = [f"* [{title}]({posixpath.basename(page)})" for title, page in decisions()]
    head = ["# Decisions", "", "Why things are as they are, for those who want to change them.", ""]
    (build / "docs" / "adr" / "index.md").write_text("\n".join(head + lines), encoding="utf-8")
    (build / "mkdocs.yml").write_text(
        yaml.safe_dump(config, sort_keys=False, allow_unicode=True), encoding="utf-8"
    )


if __name__ == "__main__":
    assemble(Path(sys.argv[1]))
