"""docs/configuration.md says what the code does."""

from pathlib import Path

from kvmem.cli.reference import option_tables


def test_the_option_tables_are_current(root: Path) -> None:
    page = (root / "docs" / "configuration.md").read_text()
    assert option_tables() in page, "run scripts/gen-docs"


def test_the_tables_name_every_flag() -> None:
    tables = option_tables()
    for flag in (
        *("`-m`", "`--kvmem-budget`", "`--kvmem/--no-kvmem`", "`-ngl`", "`--api-key`"),
        "`--log-disable`",
    ):
        assert flag in tables
    assert tables.count("| `--json` |") == 2  # of run, and of plan and calibrate
