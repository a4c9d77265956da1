"""docs/configuration.md and docs/server-api.md say what the code does."""

import json
import re
from pathlib import Path

from kvmem.chat.request import parse_chat_request
from kvmem.cli.reference import option_tables


def test_the_option_tables_are_current(root: Path) -> None:
    page = (root / "docs" / "configuration.md").read_text()
    assert option_tables() in page, "run scripts/gen-docs"


def test_the_tables_name_every_flag() -> None:
    tables = option_tables()
    for flag in ("`-m`", "`--kvmem-budget`", "`--kvmem/--no-kvmem`", "`-ngl`", "`--api-key`"):
        assert flag in tables


def test_request_examples_are_read(root: Path) -> None:
    page = (root / "docs" / "server-api.md").read_text()
    blocks = re.findall(r"```json\n(.*?)```", page, re.DOTALL) + re.findall(r"-d '(.*?)'", page)
    assert len(blocks) == 2
    for block in blocks:
        assert parse_chat_request(json.loads(block)).messages[0].text == "Hello"
