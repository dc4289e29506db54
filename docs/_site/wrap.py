"""
Wrap the documents so that a diff shows what changed: each sentence begins a line, and long ones break at about 100 characters.

    python docs/_site/wrap.py README.md docs/*.md

Only paragraphs and list items are wrapped.  Blocks of code, tables, headings, comments and HTML stay as they are, and no
line is broken inside of code or a link.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

WIDTH = 100

_ITEM = re.compile(r"( *)([*+-]|\d+\.) +")
_FIXED = re.compile(r" *($|#|\||<|>|```|!\[|\[[^\]]+\]: |---|    )")
"""Lines that are no text of a paragraph; an indented one is only text inside of a list item."""
_WORD = re.compile(r"(?:!?\[(?:`[^`]*`|[^\]`])*\](?:\([^)]*\))?|``.+?``|`[^`]*`|[^\s`\[!]|[`\[!])+")
_MARKUP = re.compile(r"([*+-]|\d+\.|#+|>|\|)$")
"""A word that would mean something else at the beginning of a line."""
_SENTENCE_END = re.compile(r"[.!?][)\"*`]*$")
_ABBREVIATION = re.compile(r"(\be\.g|\bi\.e|\bvs|\betc|^\d+)\.$")


def wrap(text: str) -> str:
    """The document with wrapped paragraphs; its words stay the same."""
    wrapped = "\n".join(_lines(text.split("\n")))
    assert wrapped.split() == text.split()
    return wrapped


def _lines(lines: list[str]) -> Iterator[str]:
    paragraph: list[str] = []
    fenced = False
    for line in lines:
        fence = line.lstrip().startswith("```")
        text = paragraph and not line.lstrip().startswith(("#", "|", "<", ">", "```", "![")) and line.strip()
        if fenced or fence:
            yield from _wrapped(paragraph)
            paragraph = []
            fenced ^= fence
            yield line
        elif _ITEM.match(line):
            yield from _wrapped(paragraph)
            paragraph = [line]
        elif text:
            paragraph.append(line)
        elif _FIXED.match(line):
            yield from _wrapped(paragraph)
            paragraph = []
            yield line
        else:
            paragraph = [line]
    yield from _wrapped(paragraph)


def _wrapped(paragraph: list[str]) -> Iterator[str]:
    if not paragraph:
        return
    if any(line.endswith(("  ", "\\")) for line in paragraph):  # line breaks that are meant
        yield from paragraph
        return
    item = _ITEM.match(paragraph[0])
    first = item[0] if item else ""
    indent = " " * len(first) if item else ""
    line, fresh = first, True
    words = _WORD.findall(" ".join(line.strip() for line in [paragraph[0][len(first) :], *paragraph[1:]]))
    for before, word in zip(["", *words], words, strict=False):
        ends = bool(_SENTENCE_END.search(before)) and not _ABBREVIATION.search(before)
        begins = ends and not word[0].islower()
        if not fresh and (begins or len(line) + 1 + len(word) > WIDTH) and not _MARKUP.match(word):
            yield line
            line, fresh = indent, True
        line += word if fresh else f" {word}"
        fresh = False
    yield line


def main() -> None:
    for name in sys.argv[1:]:
        path = Path(name)
        text = path.read_text(encoding="utf-8")
        if (wrapped := wrap(text)) != text:
            path.write_text(wrapped, encoding="utf-8")


if __name__ == "__main__":
    main()
