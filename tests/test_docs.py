"""What the documents show has to work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aqueduck.config import parse_config

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{path.name}-{number}")
    for path in DOCUMENTS
    for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", path.read_text(), re.DOTALL))
    if "groups:" in block and "source:" in block
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_configuration_in_the_documents_is_valid(block: str, tmp_path: Path) -> None:
    """Every whole configuration that a document shows is accepted as it stands."""
    config = parse_config(block, base_dir=tmp_path, env={"PG_DSN": "host=127.0.0.1 dbname=app"})
    assert config.groups


def test_documents_link_to_files_that_exist() -> None:
    """No link between our documents is broken."""
    broken = [
        f"{path.name}: {target}"
        for path in DOCUMENTS
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
        if not (path.parent / target).exists()
    ]
    assert broken == []
