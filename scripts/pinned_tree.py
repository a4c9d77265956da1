"""What vendor-llama and apply-patches share: the pin, trees of files, and unified diffs.

A pinned tree keeps its own record in `.kvmem/`:

    files      "<sha256>  <path>" of each file as the archive had it, sorted (see sha256sum -c)
    patched    the same for the files that our patches changed, as the patches left them
    orig/      those files as the archive had them

The hash of `files` stands in vendor/PIN, so the record cannot drift from the pin unseen.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
import shutil
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
RECORD = ".kvmem"
IGNORED = (RECORD, ".git")

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class Refusal(Exception):
    """A condition that ends a script; the message is one sentence that says what to do."""


# the pin


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """vendor/PIN: which archive, which folder of it, and what the kept files hash to."""

    name: str
    version: str
    sha256: str
    folder: str
    build: int
    keep: tuple[str, ...]
    drop: tuple[str, ...]
    tree_sha256: str

    @property
    def archive_name(self) -> str:
        return f"{self.name}-{self.version}.tar.gz"

    def keeps(self, path: str) -> bool:
        """Whether `path`, relative to the folder, belongs to the pinned tree."""
        if any(fnmatch.fnmatchcase(path, pattern) for pattern in self.drop):
            return False
        return any(path == part or path.startswith(part + "/") for part in self.keep)


def read_pin(path: Path = ROOT / "vendor" / "PIN") -> Pin:
    """Read vendor/PIN. Raises Refusal if a field is missing or unknown."""
    fields = tomllib.loads(path.read_text(encoding="utf-8"))
    try:
        return Pin(**{**fields, "keep": tuple(fields["keep"]), "drop": tuple(fields["drop"])})
    except (KeyError, TypeError) as error:
        raise Refusal(f"{path} is incomplete or has an unknown field ({error}).") from error


# trees of files


def list_tree(tree: Path) -> dict[str, Path]:
    """The files of `tree` by relative path, without our record and without git's."""
    found: dict[str, Path] = {}
    for path in sorted(tree.rglob("*")):
        relative = path.relative_to(tree)
        if relative.parts[0] not in IGNORED and not path.is_dir():
            found[relative.as_posix()] = path
    return found


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def hash_tree(files: Mapping[str, Path]) -> dict[str, str]:
    return {name: digest(path.read_bytes()) for name, path in files.items()}


def format_hashes(hashes: Mapping[str, str]) -> str:
    return "".join(f"{hashes[name]}  {name}\n" for name in sorted(hashes))


def parse_hashes(text: str) -> dict[str, str]:
    pairs = (line.split("  ", 1) for line in text.splitlines())
    return {name: value for value, name in pairs}


def list_differences(found: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Paths whose hashes differ or that stand on one side only, sorted."""
    return sorted(
        name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)
    )


def name_some(paths: Iterable[str], limit: int = 3) -> str:
    """The first few paths, and how many more there are."""
    names = list(paths)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


@dataclass(frozen=True, slots=True)
class Record:
    """What a pinned tree knows of itself: hashes by path, in the archive and after our patches."""

    files: Mapping[str, str]
    patched: Mapping[str, str]

    @classmethod
    def read(cls, tree: Path) -> Record | None:
        """The record of `tree`, or None if it has none."""
        folder = tree / RECORD
        if not (folder / "files").is_file():
            return None
        files = parse_hashes((folder / "files").read_text(encoding="utf-8"))
        patched = folder / "patched"
        return cls(
            files, parse_hashes(patched.read_text(encoding="utf-8")) if patched.is_file() else {}
        )


State = Literal["empty", "pin", "patched", "outdated"]


def inspect_tree(tree: Path, pin: Pin, series: Sequence[FilePatch]) -> State:
    """What `tree` is; without a record it gets one if it is the pin, with `series` or without.

    "outdated" is the pin with another set of our patches: an older series, an interrupted run.
    Raises Refusal, with the files, for a tree that anyone else has changed.
    """
    files = list_tree(tree)
    if not files:
        return "empty"
    hashes = hash_tree(files)
    record = Record.read(tree) or _adopt(tree, hashes, pin, series)
    if record is None or digest(format_hashes(record.files).encode()) != pin.tree_sha256:
        raise Refusal(
            f"{tree} is neither {pin.name} {pin.version} nor that with patches/ applied; "
            "move it away, or give it to the build as KVMEM_LLAMA_SOURCE."
        )
    edited = [
        name
        for name in list_differences(hashes, record.files)
        if name not in hashes or name not in record.patched or hashes[name] != record.patched[name]
    ]
    if edited:
        raise Refusal(
            f"{tree} differs from the pin and from our patches in {name_some(edited)}; "
            "put it back with scripts/vendor-llama --reset, "
            "or give your tree to the build as KVMEM_LLAMA_SOURCE."
        )
    if hashes == record.files:
        return "pin"
    wanted = {
        path: digest(data) for path, data in apply_changes(series, Originals(tree).read).items()
    }
    return "patched" if hashes == {**record.files, **wanted} else "outdated"


def _adopt(
    tree: Path, hashes: Mapping[str, str], pin: Pin, series: Sequence[FilePatch]
) -> Record | None:
    """Give a tree that was made elsewhere its record; None if it is not the pin, patched or not."""
    originals: dict[str, bytes] = {}
    if digest(format_hashes(hashes).encode()) != pin.tree_sha256:
        try:
            originals = apply_changes(reverse(series), lambda path: read_file(tree / path))
        except Refusal:
            return None
    files = {**hashes, **{path: digest(data) for path, data in originals.items()}}
    if digest(format_hashes(files).encode()) != pin.tree_sha256:
        return None
    record = Record(files, {path: hashes[path] for path in originals})
    write_record(tree, record, originals)
    return record


def write_record(tree: Path, record: Record, originals: Mapping[str, bytes]) -> None:
    """Write `.kvmem/`, replacing what it said of patched files."""
    folder = tree / RECORD
    shutil.rmtree(folder, ignore_errors=True)
    for path, data in originals.items():
        target = folder / "orig" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    folder.mkdir(exist_ok=True)
    (folder / "files").write_text(format_hashes(record.files), encoding="utf-8")
    if record.patched:
        (folder / "patched").write_text(format_hashes(record.patched), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Originals:
    """Files of a pinned tree as the archive had them, whether patched now or not."""

    tree: Path

    def read(self, path: str) -> bytes | None:
        kept = read_file(self.tree / RECORD / "orig" / path)
        return kept if kept is not None else read_file(self.tree / path)


def read_file(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


# unified diffs


@dataclass(frozen=True, slots=True)
class Hunk:
    """One change: `old` lines, expected from line `start` (0-based) on, become `new` lines."""

    start: int
    old: tuple[str, ...]
    new: tuple[str, ...]
    n_added: int


@dataclass(frozen=True, slots=True)
class FilePatch:
    """The hunks of one patch for one file."""

    patch: str
    path: str
    hunks: tuple[Hunk, ...]

    @property
    def n_added(self) -> int:
        return sum(hunk.n_added for hunk in self.hunks)


def read_series(patches: Path = ROOT / "patches") -> list[FilePatch]:
    """The file changes of patches/series, in order; Refusal unless each is of an existing file."""
    changes: list[FilePatch] = []
    for line in (patches / "series").read_text(encoding="utf-8").splitlines():
        name = line.split("#", 1)[0].strip()
        if not name:
            continue
        path = patches / name
        if not path.is_file():
            raise Refusal(f"patches/series names {name}, but there is no such file beside it.")
        changes.extend(parse_patch(path.read_text(encoding="utf-8"), name))
    return changes


def parse_patch(text: str, name: str) -> list[FilePatch]:
    """The file changes of one patch; text before the first `--- a/` line is its header."""
    lines = text.splitlines(keepends=True)
    starts = [
        at
        for at in range(len(lines) - 1)
        if lines[at].startswith("--- ") and lines[at + 1].startswith("+++ ")
    ]
    if not starts:
        raise Refusal(
            f"patches/{name} holds no change; expected a unified diff with a/ and b/ paths."
        )
    changes = []
    for at, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
        before, after = lines[at][4:].strip(), lines[at + 1][4:].strip()
        if before[:2] != "a/" or after[:2] != "b/" or before[2:] != after[2:]:
            raise Refusal(
                f"patches/{name} must only change existing files, not turn {before} into {after}."
            )
        hunks = tuple(_parse_hunks(lines[at + 2 : stop], name, after[2:]))
        changes.append(FilePatch(name, after[2:], hunks))
    return changes


def _parse_hunks(lines: list[str], patch: str, path: str) -> Iterator[Hunk]:
    at = 0
    while at < len(lines):
        header = _HUNK.match(lines[at])
        if header is None:  # "diff --git" and "index" lines of the next file
            at += 1
            continue
        n_old, n_new = int(header[2] or 1), int(header[4] or 1)
        old: list[str] = []
        new: list[str] = []
        n_added = 0
        at += 1
        while (len(old) < n_old or len(new) < n_new) and at < len(lines):
            mark, body = lines[at][:1], lines[at][1:]
            if mark in (" ", "\n", "-"):
                old.append(body if mark != "\n" else "\n")
            if mark in (" ", "\n", "+"):
                new.append(body if mark != "\n" else "\n")
            n_added += mark == "+"
            at += 1
        if len(old) != n_old or len(new) != n_new:
            raise Refusal(f"patches/{patch} is cut off or damaged in its change to {path}.")
        yield Hunk(max(int(header[1]) - 1, 0), tuple(old), tuple(new), n_added)


def reverse(changes: Iterable[FilePatch]) -> list[FilePatch]:
    """The changes that undo `changes`."""
    undone = []
    for change in reversed(list(changes)):
        hunks = tuple(Hunk(hunk.start, hunk.new, hunk.old, 0) for hunk in change.hunks)
        undone.append(FilePatch(change.patch, change.path, hunks))
    return undone


def apply_changes(
    changes: Iterable[FilePatch], read: Callable[[str], bytes | None]
) -> dict[str, bytes]:
    """The changed files' new contents; nothing is written. `read` gives bytes, or None for no file.

    A hunk may sit at another line than it says, as after unrelated edits, but its lines must match.
    Raises Refusal that names patch and file.
    """
    texts: dict[str, list[str]] = {}
    for change in changes:
        if change.path not in texts:
            data = read(change.path)
            if data is None:
                raise Refusal(f"{change.patch} does not apply: there is no {change.path}.")
            texts[change.path] = data.decode("utf-8").splitlines(keepends=True)
        lines, shift = texts[change.path], 0
        for number, hunk in enumerate(change.hunks, 1):
            at = _find(lines, hunk.old, hunk.start + shift)
            if at is None:
                known = _find(lines, hunk.new, hunk.start + shift) is not None
                raise Refusal(
                    f"{change.patch} does not apply to {change.path}: "
                    f"hunk {number} of {len(change.hunks)} "
                    + (
                        "is there already."
                        if known
                        else f"finds no match near line {hunk.start + 1}."
                    )
                )
            lines[at : at + len(hunk.old)] = hunk.new
            shift = at - hunk.start + len(hunk.new) - len(hunk.old)
    return {path: "".join(lines).encode("utf-8") for path, lines in texts.items()}


def _find(lines: list[str], wanted: tuple[str, ...], near: int) -> int | None:
    """The start of `wanted` in `lines` that is nearest to `near`, or None."""
    if not wanted:
        return None
    matches = [
        at
        for at in range(len(lines) - len(wanted) + 1)
        if lines[at] == wanted[0] and tuple(lines[at : at + len(wanted)]) == wanted
    ]
    return min(matches, key=lambda at: abs(at - near), default=None)
