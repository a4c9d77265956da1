"""The rules of this house that a machine can check: sizes, import direction, stubs, exports."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "kvmem"
MAX_LINES = 500
LAYERS = ("kv", "llama", "engine", "chat", "server", "cli")
# What kv shows to llama: the interface of a device, and how its rows are laid out.
SEAM = {"kvmem.kv.port", "kvmem.kv.layout"}
# What the package of JSON schemas knows of chat beside itself.
SCHEMAS_SEE = {"kvmem.chat.json_schema", "kvmem.chat.fields"}
BESIDE = {"bench": "cli"}
SUFFIXES = (".py", ".pyx", ".pxd", ".pyi", ".cpp", ".h", ".cu")

MODULES = sorted(path for path in PACKAGE.rglob("*") if path.suffix in SUFFIXES)
EXTENSIONS = [path for path in MODULES if path.suffix == ".pyx"]
IMPORT = re.compile(
    r"^\s*(?:from\s+(kvmem[\w.]*)\s+c?import\s+\(?([\w, ]*)|c?import\s+(kvmem[\w.]*))"
)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def list_imports(path: Path) -> Iterator[str]:
    """The full names of the modules of kvmem that a module imports or cimports, anywhere in it."""
    for line in path.read_text(encoding="utf-8").splitlines():
        found = IMPORT.match(line)
        if found is None:
            continue
        package = PACKAGE.joinpath(*(found[1] or "").split(".")[1:])
        if found[3] or not package.is_dir() or not found[2].strip():
            yield found[3] or found[1]
        else:
            yield from (f"{found[1]}.{name.split()[0]}" for name in found[2].split(","))


def list_tracked() -> list[Path]:
    """The files of the repository, or of an unpacked source archive."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("needs a git clone to know which files are the repository's")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    parts = path.relative_to(PACKAGE).parts
    own = parts[0] if len(parts) > 1 else None
    own = BESIDE.get(own, own) if own else None
    for imported in list_imports(path):
        target = imported.split(".")[1] if "." in imported else None
        if target in BESIDE:
            assert own == "cli", f"{imported} belongs beside cli"
        if own not in LAYERS or target not in LAYERS:
            continue
        assert LAYERS.index(target) <= LAYERS.index(own), f"{own} must not know {imported}"
        if own == "llama" and target == "kv":
            module = ".".join(imported.split(".")[:3])
            assert module in SEAM, f"llama sees of kv only {', '.join(sorted(SEAM))}"
        if parts[:2] == ("chat", "json_schema") and target == "chat":
            module = ".".join(imported.split(".")[:3])
            assert module in SCHEMAS_SEE, f"json_schema must not know {imported}"


@pytest.mark.parametrize("path", EXTENSIONS, ids=name_of)
def test_each_extension_has_a_stub(path: Path) -> None:
    assert path.with_suffix(".pyi").is_file()


@pytest.mark.parametrize("path", EXTENSIONS, ids=name_of)
def test_directives_stand_in_cmake_only(path: Path) -> None:
    for line in path.read_text(encoding="utf-8").splitlines():
        assert not re.match(r"\s*#\s*(cython|distutils)\s*:", line), line


def list_public(tree: ast.Module) -> set[str]:
    """Names without an underscore that a module or a stub defines at its top level."""
    public = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            public.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            public.add(node.target.id)
        elif isinstance(node, ast.Assign):
            public.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return {name for name in public if not name.startswith("_")}


def read_literal(tree: ast.Module, name: str) -> object:
    """The value that a module assigns to `name` at its top level, or None if it does not."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            assert isinstance(node, ast.Assign)
            return ast.literal_eval(node.value)
    return None


def read_all(tree: ast.Module) -> list[str]:
    """The names of `__all__`; empty if the module has none."""
    named = read_literal(tree, "__all__") or []
    assert isinstance(named, list)
    return named


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.name == "__init__.py"], ids=name_of
)
def test_packages_export_what_they_say(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = read_all(tree)
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvmem")
        for alias in node.names
    }
    lazy = read_literal(tree, "_EXPORTS") or {}
    assert isinstance(lazy, dict)
    for name, module in lazy.items():
        source = ROOT.joinpath("src", *module.split(".")).with_suffix(".py")
        if source.is_file():
            assert name in list_public(ast.parse(source.read_text(encoding="utf-8")))
        else:
            assert name in list_public(ast.parse(source.with_suffix(".pyi").read_text()))
    assert sorted(named) == sorted(imported | list_public(tree) | lazy.keys())


@pytest.mark.parametrize("path", [path for path in MODULES if path.suffix == ".pyi"], ids=name_of)
def test_stubs_belong_to_a_module(path: Path) -> None:
    assert path.with_suffix(".pyx").is_file()
    stub = ast.parse(path.read_text(encoding="utf-8"))
    assert set(read_all(stub)) <= list_public(stub)


def test_no_file_names_a_machine_or_a_registry() -> None:
    registry = "|".join(
        r"\.".join(host) for host in (("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"))
    )
    index = r"huggingface\.co|hf\.co/|(?<![\w.])deb\.debian\.org"
    places = "|".join(f"/{folder}/" for folder in ("work", "tmp", "root", "home"))
    wrong = re.compile(rf"{registry}|{index}|(?<![\w./])(?:{places})\w")
    found = []
    for path in list_tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{name_of(path)}: {match[0]}" for match in wrong.finditer(text)]
    assert not found
