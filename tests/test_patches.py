"""The patches to llama.cpp stay small and apply; the two scripts refuse what they must not touch.

The scripts run in a small project of their own: a pin of three files, an archive and a patch.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from pinned_tree import (
    Originals,
    Refusal,
    apply_changes,
    digest,
    format_hashes,
    inspect_tree,
    parse_patch,
    read_pin,
    read_series,
    reverse,
)

MAX_ADDED_LINES = {"0001-memory-hooks.patch": 60, "0002-replay.patch": 170}
FILES = {
    "src/code.cpp": "".join(f"line {n}\n" for n in range(20)),
    "include/llama.h": "one\ntwo\nthree\n",
    "LICENSE": "yours\n",
}
PATCH = """\
Says why.

diff --git a/src/code.cpp b/src/code.cpp
--- a/src/code.cpp
+++ b/src/code.cpp
@@ -2,3 +2,4 @@
 line 1
 line 2
+a hook
 line 3
@@ -18,3 +19,3 @@
 line 17
-line 18
+line eighteen
 line 19
"""
PATCHED = FILES["src/code.cpp"].replace("line 2\n", "line 2\na hook\n", 1)
PATCHED = PATCHED.replace("line 18\n", "line eighteen\n")


# the patches of this repository


def test_patches_add_few_lines_and_touch_no_forbidden_file() -> None:
    series = read_series()
    assert {change.patch for change in series} == set(MAX_ADDED_LINES)
    for name, limit in MAX_ADDED_LINES.items():
        assert sum(change.n_added for change in series if change.patch == name) <= limit
    for change in series:
        path = Path(change.path)
        assert path.parts[0] == "src", f"{change.patch} touches {change.path}"
        if change.patch == "0002-replay.patch" and path.name == "delta-net-base.cpp":
            continue
        assert "models" not in path.parts
        assert path.suffix in (".cpp", ".h") and path.name != "llama.h"


def test_each_patch_says_why_where_and_until_when(root: Path) -> None:
    table = (root / "patches" / "README.md").read_text()
    for name in {change.patch for change in read_series()}:
        header = (root / "patches" / name).read_text().split("\ndiff --git", 1)[0]
        for heading in ("Why", "Files", "When it can go"):
            assert f"\n{heading}\n" in header, f"{name} lacks the heading {heading}"
        touched = {Path(change.path).name for change in read_series() if change.patch == name}
        assert touched == {name for name in touched if name in header}
        assert name.removesuffix(".patch") in table


def test_the_page_on_the_adapter_counts_lines_and_names_every_file(root: Path) -> None:
    page = (root / "docs" / "adapter.md").read_text()
    for name in MAX_ADDED_LINES:
        changes = [change for change in read_series() if change.patch == name]
        section = page.split(f"`patches/{name}`, ")[1].split("`patches/")[0].split("\n## ")[0]
        n_added = sum(change.n_added for change in changes)
        assert section.startswith(f"{n_added} added lines in {len(changes)} files")
        rows = [line for line in section.splitlines() if line.startswith("| src/")]
        for change in changes:
            stem = str(Path(change.path).with_suffix(""))
            assert [row for row in rows if row.startswith(f"| {stem}.")], change.path


def test_git_applies_the_series_to_the_same_result(root: Path, tmp_path: Path) -> None:
    tree = root / "vendor" / "llama.cpp"
    if not shutil.which("git") or not (tree / "src").is_dir():
        pytest.skip("needs git and vendor/llama.cpp; scripts/vendor-llama fetches it")
    series = read_series()
    originals = Originals(tree)
    wanted = apply_changes(series, originals.read)
    for path in wanted:
        data = originals.read(path)
        assert data is not None
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "--all"], cwd=tmp_path, check=True)
    for name in dict.fromkeys(change.patch for change in series):
        subprocess.run(["git", "apply", root / "patches" / name], cwd=tmp_path, check=True)
    assert {path: (tmp_path / path).read_bytes() for path in wanted} == wanted
    counted = subprocess.run(
        ["git", "diff", "--numstat"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    n_added = sum(int(line.split()[0]) for line in counted.stdout.splitlines())
    assert n_added == sum(change.n_added for change in series)


def test_vendored_tree_is_the_pin_with_the_patches(root: Path) -> None:
    tree = root / "vendor" / "llama.cpp"
    if not tree.is_dir():
        pytest.skip("needs vendor/llama.cpp; scripts/vendor-llama fetches it")
    assert inspect_tree(tree, read_pin(), read_series()) == "patched"


# applying, in memory


def test_hunks_may_have_moved_but_must_match() -> None:
    changes = parse_patch(PATCH, "x.patch")
    moved = ("new\n" * 5 + FILES["src/code.cpp"]).encode()
    assert (
        apply_changes(changes, lambda path: moved)["src/code.cpp"]
        == b"new\n" * 5 + PATCHED.encode()
    )
    edited = FILES["src/code.cpp"].replace("line 17", "line XVII").encode()
    with pytest.raises(Refusal, match=r"x\.patch does not apply to src/code\.cpp: hunk 2 of 2"):
        apply_changes(changes, lambda path: edited)
    with pytest.raises(Refusal, match=r"hunk 1 of 2 is there already"):
        apply_changes(changes, lambda path: PATCHED.encode())
    with pytest.raises(Refusal, match=r"there is no src/code\.cpp"):
        apply_changes(changes, lambda path: None)


def test_reverse_undoes() -> None:
    changes = parse_patch(PATCH, "x.patch")
    undone = apply_changes(reverse(changes), lambda path: PATCHED.encode())
    assert undone == {"src/code.cpp": FILES["src/code.cpp"].encode()}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no diff at all\n", "holds no change"),
        (PATCH.replace("--- a/src/code.cpp", "--- /dev/null"), "must only change existing files"),
        (PATCH.removesuffix(" line 19\n"), "cut off"),
    ],
)
def test_damaged_patches_are_named(text: str, said: str) -> None:
    with pytest.raises(Refusal, match=said):
        parse_patch(text, "x.patch")


# the scripts, in a project of three files


@dataclass(frozen=True)
class Project:
    """A copy of the scripts with a small pin of its own."""

    root: Path

    @property
    def tree(self) -> Path:
        return self.root / "vendor" / "llama.cpp"

    @property
    def archive(self) -> Path:
        return self.root / "vendor" / "tiny-1.0.tar.gz"

    def run(self, script: str, *arguments: str | Path, status: int = 0) -> str:
        """Run a script without a network; its output, or its one line of error if it must fail."""
        result = subprocess.run(
            [sys.executable, self.root / "scripts" / script, *arguments],
            env={
                **os.environ,
                "PIP_NO_INDEX": "1",
                "PIP_CONFIG_FILE": os.devnull,
                "PIP_FIND_LINKS": "",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == status, result.stderr
        if status:
            assert result.stderr.startswith(f"{script}: ")
            assert result.stderr.count("\n") == 1, "an error is one line"
        return result.stderr if status else result.stdout

    def content(self) -> dict[str, str]:
        return {
            name: (self.tree / name).read_text() for name in FILES if (self.tree / name).exists()
        }


def pack(path: Path, files: dict[str, str]) -> str:
    """Write the archive `path`, with one file outside the kept folder; its SHA-256."""
    with tarfile.open(path, "w:gz") as archive:
        for name, text in {**files, "../setup.py": "print('no')\n"}.items():
            member = tarfile.TarInfo(os.path.normpath(f"tiny-1.0/source/{name}"))
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def project(root: Path, tmp_path: Path) -> Project:
    shutil.copytree(
        root / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "vendor").mkdir()
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches" / "series").write_text("one.patch  # the only one\n")
    (tmp_path / "patches" / "one.patch").write_text(PATCH)
    made = Project(tmp_path)
    hashes = {name: digest(text.encode()) for name, text in FILES.items()}
    fields = {
        "name": "tiny",
        "version": "1.0",
        "sha256": pack(made.archive, {**FILES, "src/test.mp3": "media"}),
        "folder": "source",
        "tree_sha256": digest(format_hashes(hashes).encode()),
    }
    lines = [f'{name} = "{value}"' for name, value in fields.items()]
    lines += ["build = 1", 'keep = ["src", "include", "LICENSE"]', 'drop = ["src/*.mp3"]']
    (tmp_path / "vendor" / "PIN").write_text("\n".join(lines) + "\n")
    return made


def test_vendor_and_apply_twice(project: Project) -> None:
    project.run("vendor-llama")
    assert project.content() == FILES
    assert not (project.tree / "src" / "test.mp3").exists()
    assert "there already" in project.run("vendor-llama")
    project.run("apply-patches")
    assert project.content() == {**FILES, "src/code.cpp": PATCHED}
    times = {path: path.stat().st_mtime_ns for path in project.tree.rglob("*")}
    assert "already" in project.run("apply-patches")
    assert "there already" in project.run("vendor-llama")
    assert times == {path: path.stat().st_mtime_ns for path in project.tree.rglob("*")}


def test_a_changed_series_starts_from_the_original(project: Project) -> None:
    project.run("vendor-llama")
    project.run("apply-patches")
    untouched = (project.tree / "LICENSE").stat().st_mtime_ns
    patch = project.root / "patches" / "one.patch"
    patch.write_text(PATCH.replace("+a hook", "+another hook"))
    project.run("apply-patches")
    assert project.content()["src/code.cpp"] == PATCHED.replace("a hook", "another hook")
    (project.root / "patches" / "series").write_text("")
    project.run("apply-patches")
    assert project.content() == FILES
    assert (project.tree / "LICENSE").stat().st_mtime_ns == untouched


def test_an_interrupted_run_is_taken_up(project: Project) -> None:
    project.run("vendor-llama")
    project.run("apply-patches")
    (project.tree / "src" / "code.cpp").write_text(FILES["src/code.cpp"])
    project.run("apply-patches")
    assert project.content()["src/code.cpp"] == PATCHED


def test_a_failing_patch_changes_nothing(project: Project) -> None:
    project.run("vendor-llama")
    patch = project.root / "patches" / "one.patch"
    patch.write_text(PATCH.replace(" line 17", " line XVII"))
    said = project.run("apply-patches", status=1)
    assert "one.patch does not apply to src/code.cpp: hunk 2 of 2" in said
    assert project.content() == FILES


def edit(tree: Path) -> None:
    (tree / "src" / "code.cpp").write_text("mine\n")


def add(tree: Path) -> None:
    (tree / "src" / "mine.cpp").write_text("mine\n")


def remove(tree: Path) -> None:
    (tree / "include" / "llama.h").unlink()


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize(
    ("change", "named"),
    [(edit, "src/code.cpp"), (add, "src/mine.cpp"), (remove, "include/llama.h")],
)
def test_an_edited_tree_is_refused_and_can_be_reset(
    project: Project, change: Callable[[Path], None], named: str, patched: bool
) -> None:
    project.run("vendor-llama")
    if patched:
        project.run("apply-patches")
    change(project.tree)
    before = project.content()
    for script in ("vendor-llama", "apply-patches"):
        assert named in project.run(script, status=1)
    assert project.content() == before
    project.run("vendor-llama", "--reset")
    assert project.content() == FILES
    assert not (project.tree / "src" / "mine.cpp").exists()


def test_a_tree_without_a_record_is_known_or_refused(project: Project) -> None:
    project.run("vendor-llama")
    project.run("apply-patches")
    shutil.rmtree(project.tree / ".kvmem")
    assert "already" in project.run("apply-patches")
    shutil.rmtree(project.tree / ".kvmem")
    edit(project.tree)
    assert "is neither tiny 1.0 nor that with patches/" in project.run("apply-patches", status=1)


def test_a_wrong_archive_is_refused(project: Project) -> None:
    pack(project.archive, {**FILES, "src/code.cpp": "bad\n"})
    assert "has SHA-256" in project.run("vendor-llama", status=1)
    assert not project.tree.exists()


def test_a_cut_off_archive_is_refused(project: Project) -> None:
    project.archive.write_bytes(project.archive.read_bytes()[:-20])
    assert "is cut off after" in project.run("vendor-llama", status=1)
    assert not project.tree.exists()


def test_no_network_says_what_to_do(project: Project) -> None:
    project.archive.unlink()
    said = project.run("vendor-llama", status=1)
    assert "pip could not download tiny 1.0" in said
    assert "KVMEM_LLAMA_SOURCE" in said
    assert sorted(path.name for path in (project.root / "vendor").iterdir()) == ["PIN"]


def test_an_archive_may_be_given(project: Project, tmp_path: Path) -> None:
    elsewhere = project.archive.rename(tmp_path / "given.tar.gz")
    project.run("vendor-llama", "--archive", elsewhere)
    assert project.content() == FILES


def test_a_checkout_is_copied_and_never_changed(project: Project, tmp_path: Path) -> None:
    project.run("vendor-llama")
    checkout, tree = project.tree.rename(tmp_path / "checkout"), project.tree
    (checkout / "src" / "mine.cpp").write_text("mine\n")
    project.run("apply-patches", "--from", checkout, tree)
    assert project.content() == {**FILES, "src/code.cpp": PATCHED}
    assert (checkout / "src" / "code.cpp").read_text() == FILES["src/code.cpp"]
    (checkout / "src" / "mine.cpp").unlink()
    assert "(0 files written)" in project.run("apply-patches", "--from", checkout, tree)
    assert not (tree / "src" / "mine.cpp").exists()


def test_a_checkout_that_does_not_fit_is_named(project: Project, tmp_path: Path) -> None:
    project.run("vendor-llama")
    checkout, tree = project.tree.rename(tmp_path / "checkout"), project.tree
    edit(checkout)
    said = project.run("apply-patches", "--from", checkout, tree, status=1)
    assert "one.patch does not apply to src/code.cpp: hunk 1 of 2" in said
    assert not tree.exists()
    assert "is no llama.cpp checkout" in project.run(
        "apply-patches", "--from", tree, tree, status=1
    )
