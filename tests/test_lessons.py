"""The page of lessons names tests that exist."""

import re
from pathlib import Path

NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def test_every_lesson_has_its_tests(root: Path) -> None:
    rows = [
        line for line in (root / "docs/lessons.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| ") and not line.startswith("| what")
    ]  # fmt: skip
    assert len(rows) > 20
    for row in rows:
        found = NAMED.findall(row)
        assert found, f"neither test nor reason: {row}"
        for path, name in found:
            module = (root / path).read_text(encoding="utf-8")
            assert re.search(rf"^def {name}\(", module, re.MULTILINE), f"{path}::{name}"
