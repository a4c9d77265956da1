"""The wheel and the source archive that `make ci` built, looked at and installed as by a user.

`make ci` leaves beside the folder that KVMEM_DIST names `source/`, the unpacked archive,
`objects/`, the build folder of the wheel, and `user/`, an environment with the wheel and what it
needs to run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from pinned_tree import inspect_tree, read_pin, read_series

# alone: some of them build once more in `objects/`, and look at what was compiled for it
pytestmark = [pytest.mark.wheel, pytest.mark.slow, pytest.mark.alone]

# Libraries that every Linux with glibc and libstdc++ has; CUDA's are the machine's own.
SYSTEM_LIBRARIES = re.compile(
    r"(libc|libm|libdl|libpthread|librt|libstdc\+\+|libgcc_s|ld-linux-x86-64|ld-linux-aarch64"
    r"|libcuda|libcudart|libcublas|libcublasLt|libnccl)\.so(\.\d+)*"
)
SUFFIXES = {".py", ".pyi", ".pxd", ".so", ".typed", ".html", ".css", ".js", ".svg", ".json"}


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """The output of a command that must succeed; no variable tells it where libraries are."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "KVMEM_LLAMA_SOURCE")
    }
    result = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    assert len(found) == 1, f"{folder} holds {len(found)} of {pattern}"
    return found[0]


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return only(dist, "kvmem-*.whl")


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def make_environment(folder: Path) -> Path:
    """A new virtual environment without pip; its Python."""
    venv.create(folder)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a clean environment that holds the wheel and nothing else."""
    python = make_environment(tmp_path_factory.mktemp("clean") / "venv")
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel)
    return python


# what is in the wheel


def test_wheel_holds_the_package_and_its_licences_only(unpacked: Path) -> None:
    files = {path.relative_to(unpacked) for path in unpacked.rglob("*") if path.is_file()}
    info = only(unpacked, "kvmem-*.dist-info").name
    assert {path.parts[0] for path in files} == {"kvmem", info}
    assert {Path(info, "licenses", name) for name in ("LICENSE", "NOTICE")} <= files
    strange = [path for path in files if path.parts[0] == "kvmem" and path.suffix not in SUFFIXES]
    assert not strange


def test_libraries_have_our_names(unpacked: Path) -> None:
    names = sorted(path.name for path in (unpacked / "kvmem" / "lib").iterdir())
    wanted = (
        "libkvmem-llama.so",
        "libkvmem-ggml.so",
        "libkvmem-ggml-base.so",
        "libkvmem-bridge.so",
    )
    assert set(wanted) <= set(names)
    assert all(name.startswith("libkvmem-") and name.endswith(".so") for name in names)


def test_notice_names_what_is_inside(unpacked: Path, root: Path) -> None:
    notice = next(unpacked.glob("*.dist-info/licenses/NOTICE")).read_text()
    upstream = (root / "vendor" / "llama.cpp" / "LICENSE").read_text()
    copyright_line = next(line for line in upstream.splitlines() if line.startswith("Copyright"))
    assert copyright_line in notice
    assert "SmolLM2" in notice and "Apache" in notice


def test_no_file_names_the_folder_it_was_built_in(unpacked: Path, root: Path, dist: Path) -> None:
    known = [str(path).encode() for path in (root, dist.parent, Path.home(), sys.prefix)]
    source = re.compile(rb"(?<![\w.:/])/[\w./+-]+\.(?:cpp|cu|c|cuh|h|hpp|pyx|pxd)\b")
    for path in unpacked.rglob("*"):
        if not path.is_file():
            continue
        data = path.read_bytes()
        named = [name for name in known if name in data]
        if path.suffix == ".so":
            named += source.findall(data)
        assert not named, f"{path.name} names {named[:3]}"


def list_dynamic(path: Path, tag: str) -> list[str]:
    """The values of one tag (NEEDED, SONAME, RUNPATH) in a library's dynamic section."""
    return re.findall(rf"\({tag}\).*\[(.*)\]", run("readelf", "--dynamic", "--wide", path))


def test_libraries_need_ours_and_the_systems_only(unpacked: Path) -> None:
    ours = {path.name for path in (unpacked / "kvmem" / "lib").iterdir()}
    for path in unpacked.rglob("*.so"):
        for needed in list_dynamic(path, "NEEDED"):
            assert needed in ours or SYSTEM_LIBRARIES.fullmatch(needed), f"{path.name}: {needed}"
        assert list_dynamic(path, "SONAME") in ([], [path.name])
        paths = list_dynamic(path, "RUNPATH") + list_dynamic(path, "RPATH")
        assert set(paths) <= {"$ORIGIN", "$ORIGIN/../lib"}, f"{path.name}: {paths}"


def list_exports(path: Path) -> list[str]:
    lines = run("nm", "--dynamic", "--defined-only", "--demangle", path).splitlines()
    return [line.split(maxsplit=2)[2] for line in lines]


def test_exports_are_llama_and_our_own(unpacked: Path, root: Path) -> None:
    lib = unpacked / "kvmem" / "lib"
    extended = (root / "vendor" / "llama.cpp" / "src" / "llama-ext.h").read_text()
    for name in list_exports(lib / "libkvmem-llama.so"):
        if "(" in name:  # a C++ function, which only llama-ext.h may declare
            assert re.search(rf"\b{re.escape(name.split('(')[0])} *\(", extended), name
        else:
            assert name.startswith(("llama_", "kvmem_")), name
    assert all(name.startswith("kvmem_") for name in list_exports(lib / "libkvmem-bridge.so"))


def test_the_bridge_prints_nothing_of_a_prompt(unpacked: Path) -> None:
    """llama-common's fprintf to stderr, also as _FORTIFY_SOURCE has it, is replaced."""
    bridge = unpacked / "kvmem" / "lib" / "libkvmem-bridge.so"
    imports = run("nm", "--dynamic", "--undefined-only", "--without-symbol-versions", bridge)
    assert "vfprintf" in imports.split()
    assert not {"fprintf", "__fprintf_chk"} & set(imports.split())


# the wheel, installed

IMPORT = """
import sys, threading
before = set(sys.modules)
import kvmem
after = {name for name in set(sys.modules) - before if name.split('.')[0] == 'kvmem'}
with open('/proc/self/maps') as maps:
    mapped = 'libkvmem' in maps.read()
sys.exit(repr((after, mapped, threading.active_count())) if mapped or len(after) > 1 else 0)
"""

LOAD = """
import ctypes, pathlib, kvmem
lib = pathlib.Path(kvmem.__file__).parent / 'lib'
for path in sorted(lib.iterdir()):
    ctypes.CDLL(str(path))
print(ctypes.CDLL(str(lib / 'libkvmem-llama.so')).llama_max_devices())
"""


def test_importing_kvmem_does_nothing(installed: Path, tmp_path: Path) -> None:
    assert run(installed, "-W", "error", "-c", IMPORT, cwd=tmp_path) == ""


def test_libraries_load_without_any_variable(installed: Path, tmp_path: Path) -> None:
    assert int(run(installed, "-c", LOAD, cwd=tmp_path)) > 0


def test_the_installed_command_tells_its_version(
    installed: Path, wheel: Path, tmp_path: Path
) -> None:
    """With what kvmem needs from the environment of the tests, behind the installed package."""
    command = (
        "import sys; sys.path.append(sys.argv.pop(1)); from kvmem.__main__ import main; main()"
    )
    others = sysconfig.get_path("purelib")
    shown = run(installed, "-c", command, others, "--version", cwd=tmp_path)
    version = re.escape(wheel.name.split("-")[1])
    assert re.fullmatch(rf"kvmem {version}, llama\.cpp b\d+\n", shown)
    entry = installed.with_name("kvmem")
    assert entry.is_file() and "from kvmem.__main__ import main" in entry.read_text()


def test_it_runs_with_what_it_declares_to_need_and_no_more(
    dist: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    user = dist.parent / "user" / "bin"
    run(user / "python", "-m", "pip", "check")  # what the wheel's own list names is there
    listed = run(user / "python", "-m", "pip", "list", "--format", "freeze").lower()
    assert "kvmem==" in listed and "pytest" not in listed
    asked = ("-c", "512", "-t", "1", "-n", "6", "--temp", "0", "-p", "who built the tower?")
    said = run(user / "kvmem", "run", "-m", tiny_llama, *asked, "--json", cwd=tmp_path)
    assert json.loads(said)["usage"]["completion_tokens"] == 6
    assert "serve" in run(user / "kvmem", "--help", cwd=tmp_path)


def test_extension_modules_import(dist: Path, tmp_path: Path) -> None:
    names = "import importlib, pathlib, kvmem\n"
    names += "root = pathlib.Path(kvmem.__file__).parent\n"
    names += "for path in sorted(root.rglob('*.cpython-*.so')):\n"
    names += "    parts = path.relative_to(root.parent).with_name(path.name.split('.')[0]).parts\n"
    names += "    importlib.import_module('.'.join(parts)); print('.'.join(parts))\n"
    imported = run(sys.executable, "-c", names, cwd=tmp_path).split()
    assert "kvmem._cyutility" in imported and len(imported) > 1


# the source archive


def test_source_archive_carries_the_patched_llama(dist: Path, root: Path) -> None:
    with tarfile.open(only(dist, "kvmem-*.tar.gz")) as archive:
        names = [name.split("/", 1)[1] for name in archive.getnames()]
    assert not [name for name in names if name.endswith((".so", ".o", ".gguf", ".tar.gz"))]
    assert {"LICENSE", "NOTICE", "README.md", "patches/series", "vendor/PIN"} <= set(names)
    source = dist.parent / "source"
    state = inspect_tree(source / "vendor" / "llama.cpp", read_pin(), read_series())
    assert state == "patched"
    # the wheel was built there with --no-index: nothing was downloaded for it
    assert not list((source / "vendor").glob("*.tar.gz"))


def test_editable_install_works_from_any_folder(dist: Path, tmp_path: Path) -> None:
    source, objects = dist.parent / "source", dist.parent / "objects"
    llama = objects / "bin" / "libkvmem-llama.so"
    built = llama.stat().st_mtime_ns
    elsewhere, prefix = tmp_path / "elsewhere", tmp_path / "prefix"
    elsewhere.mkdir()
    # The same Python as the wheel's, since scikit-build-core empties the build folder of another.
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps")
    into = ("--no-index", "--ignore-installed", "--prefix", prefix)
    settings = ("--config-settings", f"build-dir={objects}")
    run(*pip, *into, *settings, "--editable", source, cwd=elsewhere)
    assert llama.stat().st_mtime_ns == built, "the editable install has built llama.cpp again"
    packages = next(prefix.glob("lib/python*/site-packages"))
    code = "import site, sys; site.addsitedir(sys.argv[1]); import kvmem, kvmem._cyutility as c; "
    code += "import kvmem.llama.runtime; print(kvmem.__file__); print(c.__file__)"
    module, extension = run(sys.executable, "-c", code, packages, cwd=elsewhere).split()
    assert Path(module).is_relative_to(source)
    assert Path(extension).is_relative_to(prefix)


# building again


def list_compiled(objects: Path) -> list[str]:
    """Build once more; what was compiled for it."""
    # the ninja that built it: another version starts over, as it does not read the log
    cache = (objects / "CMakeCache.txt").read_text()
    found = re.search(r"^CMAKE_MAKE_PROGRAM:\w+=(.+)$", cache, re.MULTILINE)
    assert found is not None
    ninja = Path(found[1])
    lines = run(ninja, "-C", objects, "-j", "2").splitlines()
    return [line for line in lines if re.match(r"\[\d+/\d+\] Building", line)]


@pytest.mark.parametrize("pattern", ["src/kvmem/kv/*.pyx", "src/kvmem/adapter/*.cpp"])
def test_a_change_compiles_one_file(dist: Path, pattern: str) -> None:
    objects = dist.parent / "objects"
    assert list_compiled(objects) == []
    path = sorted((dist.parent / "source").glob(pattern))[0]
    os.utime(path)
    compiled = list_compiled(objects)
    assert len(compiled) == 1 and path.stem in compiled[0]
    assert list_compiled(objects) == []
