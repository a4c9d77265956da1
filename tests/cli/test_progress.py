"""Progress where stderr is no terminal; test_bench.py has that of a real run."""

import pytest

from kvmem.cli import logs, progress


def test_what_is_short_stays_silent(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(verbose=False)
    with progress.progress() as report:
        report("questions", 1, 2)
    assert capsys.readouterr().err == ""


def test_bytes_are_told_with_their_unit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logs.set_up(verbose=False)
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    with progress.progress(unit_bytes=True) as report:
        report("downloading", 3 << 19, 3 << 20)
    assert capsys.readouterr().err == "downloading: 1.5 MiB of 3.0 MiB\n"
