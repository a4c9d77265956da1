"""What a configure step does without a build: its forms, and what it says when a thing is missing.

Each configure gets a copy of the source tree, so that it cannot lean on what lies in this one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from pinned_tree import Originals, read_pin, read_series
from scikit_build_core.settings.skbuild_read_settings import SettingsReader

import kvmem

pytestmark = pytest.mark.slow

Configure = Callable[..., subprocess.CompletedProcess[str]]


def find_tool(name: str) -> str:
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}")
    return found


@pytest.fixture
def source(root: Path, tmp_path: Path) -> Path:
    """The source tree as a fresh clone has it, without llama.cpp."""
    folder = tmp_path / "source"
    for name in ("CMakeLists.txt", "scripts", "patches", "src", "vendor/PIN"):
        origin, target = root / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if origin.is_dir():
            shutil.copytree(origin, target, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(origin, target)
    return folder


@pytest.fixture
def configure(source: Path, tmp_path: Path) -> Configure:
    """Run CMake on the fresh source tree, without a network; keywords are its definitions."""

    def run(
        environment: Mapping[str, str] | None = None, **definitions: str | Path
    ) -> subprocess.CompletedProcess[str]:
        flags = [f"-D{name}={value}" for name, value in definitions.items()]
        flags += [f"-DPython_EXECUTABLE={sys.executable}"]
        flags += [f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}", "-G", "Ninja"]
        offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
        command = [find_tool("cmake"), "-S", str(source), "-B", str(tmp_path / "objects"), *flags]
        return subprocess.run(
            command,
            env={**os.environ, **offline, **(environment or {})},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture
def vendored(root: Path, source: Path) -> Path:
    """`source` with the patched llama.cpp."""
    tree = root / "vendor" / "llama.cpp"
    if not tree.is_dir():
        pytest.skip("needs vendor/llama.cpp; scripts/vendor-llama fetches it")
    shutil.copytree(tree, source / "vendor" / "llama.cpp", ignore=shutil.ignore_patterns(".git"))
    return source


def read_message(result: subprocess.CompletedProcess[str]) -> str:
    """The text of the CMake error that ended a configure, on one line."""
    assert result.returncode != 0, "the configure step should have failed"
    assert result.stderr.count("CMake Error") == 1, result.stderr
    body = result.stderr.split("(message):", 1)[1].split("\n\n\n")[0].split("Call Stack")[0]
    return " ".join(body.split())


# forms


def test_kv_alone_needs_no_llama(configure: Configure, source: Path) -> None:
    result = configure(KVMEM_LLAMA="OFF")
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in (source / "vendor").iterdir()) == ["PIN"]


def list_libraries(objects: Path) -> set[str]:
    """The shared libraries that ninja knows how to link."""
    listed = subprocess.run(
        [find_tool("ninja"), "-C", objects, "-t", "targets", "all"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(re.findall(r"^bin/(\S+\.so): ", listed.stdout, re.MULTILINE))


def test_release_form_has_loadable_variants(
    configure: Configure, vendored: Path, tmp_path: Path
) -> None:
    result = configure(KVMEM_RELEASE="ON")
    assert result.returncode == 0, result.stderr
    libraries = list_libraries(tmp_path / "objects")
    assert {"libkvmem-ggml-base.so", "libkvmem-ggml.so", "libkvmem-llama.so"} <= libraries
    assert len([name for name in libraries if name.startswith("libkvmem-ggml-cpu-")]) > 4
    assert all(name.startswith("libkvmem-") for name in libraries)


LOAD = """
import ctypes, pathlib, sys
from kvmem.llama.backends import choose_backends
folder = pathlib.Path(sys.argv[1])
base, ggml = (ctypes.CDLL(folder / f'libkvmem-{name}.so') for name in ('ggml-base', 'ggml'))
ggml.ggml_backend_load.argtypes, ggml.ggml_backend_load.restype = [ctypes.c_char_p], ctypes.c_void_p
ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
print(ggml.ggml_backend_dev_count())
for path in choose_backends(folder):
    print(path.name, bool(ggml.ggml_backend_load(bytes(path))))
print(ggml.ggml_backend_dev_count())
"""


def load_backends(source: Path, folder: Path) -> list[str]:
    """The words that LOAD prints: devices before, each module chosen, devices after."""
    said = subprocess.run(
        [sys.executable, "-c", LOAD, folder],
        env={**os.environ, "PYTHONPATH": str(source / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    return said.stdout.split()


def test_release_form_runs_with_its_one_variant(
    configure: Configure, vendored: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    result = configure(KVMEM_RELEASE="ON", GGML_CPU_ALL_VARIANTS="OFF")
    assert result.returncode == 0, result.stderr
    objects = tmp_path / "objects"
    targets = ["ggml-base", "ggml", "ggml-cpu"]
    subprocess.run([find_tool("ninja"), "-C", objects, "-j", "2", *targets], check=True)
    said = load_backends(vendored, objects / "bin")
    assert said == ["0", "libkvmem-ggml-cpu.so", "True", "1"]

    # llama.cpp and the bindings are the same in both forms
    site = tmp_path / "site"
    shutil.copytree(Path(kvmem.__file__).parent, site / "kvmem")
    for library in (objects / "bin").glob("libkvmem-ggml*.so"):
        shutil.copy(library, site / "kvmem" / "lib")
    answer = [sys.executable, "-m", "kvmem", "run", "-m", str(tiny_llama), "-c", "512", "-t", "1"]
    ran = subprocess.run(
        [*answer, "-p", "the light", "-n", "4", "--json"],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["usage"]["completion_tokens"] == 4


def test_own_checkout_is_copied_and_patched(
    configure: Configure, vendored: Path, tmp_path: Path
) -> None:
    checkout = make_checkout(vendored, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in checkout.rglob("*")}
    result = configure(KVMEM_LLAMA_SOURCE=checkout)
    assert result.returncode == 0, result.stderr
    assert before == {path: path.stat().st_mtime_ns for path in checkout.rglob("*")}
    compiled = json.loads((tmp_path / "objects" / "compile_commands.json").read_text())
    sources = {str(entry["file"]) for entry in compiled if "llama-kv-cache.cpp" in entry["file"]}
    assert sources == {str(tmp_path / "objects" / "llama.cpp" / "src" / "llama-kv-cache.cpp")}


def make_checkout(vendored: Path, tmp_path: Path) -> Path:
    """An unpatched llama.cpp, moved out of `vendored`."""
    checkout = (vendored / "vendor" / "llama.cpp").rename(tmp_path / "checkout")
    for path in {change.path for change in read_series()}:
        data = Originals(checkout).read(path)
        assert data is not None
        (checkout / path).write_bytes(data)
    shutil.rmtree(checkout / ".kvmem")
    return checkout


def test_own_checkout_that_does_not_fit_is_named(
    configure: Configure, vendored: Path, tmp_path: Path
) -> None:
    checkout = make_checkout(vendored, tmp_path)
    path = checkout / "src" / "llama-kv-cache.cpp"
    path.write_text(path.read_text().replace("find_slot", "look_for_slot"))
    said = read_message(configure(KVMEM_LLAMA_SOURCE=checkout))
    assert re.search(r"apply-patches: \S+\.patch does not apply to src/llama-kv-cache\.cpp", said)
    assert not (tmp_path / "objects" / "llama.cpp").exists()


# what is missing


def test_no_network_is_one_sentence(configure: Configure) -> None:
    said = read_message(configure())
    pin = read_pin()
    assert said.startswith(f"vendor-llama: pip could not download {pin.name} {pin.version}")
    assert "KVMEM_LLAMA_SOURCE" in said


def test_edited_llama_is_refused(configure: Configure, vendored: Path) -> None:
    (vendored / "vendor" / "llama.cpp" / "src" / "llama.cpp").write_text("// mine\n")
    assert "differs from the pin and from our patches in src/llama.cpp" in read_message(configure())


def test_no_compiler_is_one_sentence(configure: Configure, tmp_path: Path) -> None:
    empty = tmp_path / "path"
    empty.mkdir()
    cmake = find_tool("cmake")
    assert not cmake.startswith("/usr/bin/") or sys.platform == "linux"
    said = read_message(configure({"PATH": str(empty), "CC": "", "CXX": ""}, KVMEM_LLAMA="OFF"))
    assert said.startswith("kvmem: no working C and C++ compiler was found; install one")


CUDA_PROJECT = """
cmake_minimum_required(VERSION 3.26)
project(probe LANGUAGES NONE)
list(APPEND CMAKE_MODULE_PATH ${CMAKE_CURRENT_SOURCE_DIR})
include(%s)
message(STATUS "pairs ${GGML_CUDA_FA_QUANTS}")
"""

FIND_CUDA = """
set(CUDAToolkit_FOUND %s)
set(CUDAToolkit_VERSION %s)
if(CUDAToolkit_FOUND AND NOT TARGET CUDA::cublas)
    add_library(CUDA::cublas INTERFACE IMPORTED)
    add_library(CUDA::cuda_driver INTERFACE IMPORTED)
endif()
"""


def configure_cuda(root: Path, folder: Path, version: str, *, found: str = "TRUE") -> str:
    """What scripts/cmake/cuda.cmake says of a toolkit of that version."""
    (folder / "CMakeLists.txt").write_text(
        CUDA_PROJECT % (root / "scripts" / "cmake" / "cuda.cmake")
    )
    (folder / "FindCUDAToolkit.cmake").write_text(FIND_CUDA % (found, version))
    ninja = f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}"
    command = [find_tool("cmake"), "-S", str(folder), "-B", str(folder / version), "-G", "Ninja"]
    result = subprocess.run([*command, ninja], capture_output=True, text=True, check=False)
    return result.stdout + result.stderr


def test_cuda_sets_the_pairs_and_warns_of_one_compiler(root: Path, tmp_path: Path) -> None:
    said = {version: configure_cuda(root, tmp_path, version) for version in ("13.0.88", "13.2.78")}
    assert "pairs q4_0-q4_0;q5_0-q5_0;q8_0-q8_0;f16-f16" in said["13.0.88"]
    assert "miscompiles" not in said["13.0.88"]
    assert "nvcc 13.2.78 miscompiles" in said["13.2.78"]
    assert "miscompiles" not in configure_cuda(root, tmp_path, "13.2.86")


def test_no_cuda_toolkit_is_one_sentence(root: Path, tmp_path: Path) -> None:
    said = " ".join(configure_cuda(root, tmp_path, "0", found="FALSE").split())
    assert "kvmem: KVMEM_CUDA is on but no CUDA toolkit was found" in said


@pytest.mark.parametrize("option", ["KVMEM_CUDA", "KVMEM_RELEASE", "KVMEM_CHECKS"])
def test_pip_takes_an_option_from_the_environment(
    root: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`KVMEM_CUDA=1 pip install .`: what CMake is called with."""

    def defined() -> dict[str, object]:
        reader = SettingsReader.from_file(root / "pyproject.toml", {}, state="wheel")
        return dict(reader.settings.cmake.define)

    monkeypatch.delenv(option, raising=False)
    assert defined()[option] == "OFF"
    monkeypatch.setenv(option, "1")
    assert defined()[option] == "1"
