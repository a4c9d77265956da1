# The commands of a working day. Each sets up what it needs; `make demo` and `make ci` are the two to begin with.
#
#   setup     .venv with everything that builds, checks and tests kvmem
#   build     kvmem in .venv, editable; again after a change: compiles only what changed
#   demo      build, fetch the demo model, run the demo
#   test      the quick tests
#   ci        all checks and tests, on a wheel made from a source archive
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
REQUIRE := $(BIN)/python scripts/requirements

# Each test has one thread, so as many run side by side as there are processes; those marked `alone` follow one by one.
PROCESSES ?= 2
PYTEST := $(BIN)/python -m pytest
SIDE_BY_SIDE := --numprocesses $(PROCESSES) --dist worksteal

CI_VENV := build/ci/venv

.PHONY: setup build demo check format test test-all test-checks test-gpu bench docs wheel ci clean

setup: $(VENV)/ready

# What pip installs is listed in pyproject.toml alone; a change there sets up again.
$(VENV)/ready: pyproject.toml scripts/requirements
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(REQUIRE) build dev run test check > $(VENV)/requirements.txt
	$(PIP) install --quiet --requirement $(VENV)/requirements.txt
	touch $@

# Objects stay in build/editable, and without build isolation Cython, CMake and ninja stay the same from build to build:
# so ninja sees only real changes. A plain `pip install .` has its own temporary folder and tools, and compiles it all.
EDITABLE := --quiet --no-build-isolation --no-deps --no-index --config-settings build-dir=build/editable --editable .

build: setup
	$(PIP) install $(EDITABLE)

demo: build
	$(BIN)/kvmem demo-model
	$(BIN)/kvmem demo

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/cython-lint src/kvmem  # it calls pycodestyle
	find src/kvmem \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' \) -exec $(BIN)/clang-format --dry-run -Werror {} +

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find src/kvmem \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' \) -exec $(BIN)/clang-format -i {} +

test: build
	$(PYTEST) $(SIDE_BY_SIDE) -m "not slow and not wheel and not gpu and not alone"
	$(PYTEST) -m "alone and not slow and not wheel and not gpu"

test-gpu: setup
	$(BIN)/python scripts/build-cuda
	$(PYTEST) -m gpu

# kv/ alone with bounds checks and sanitizers; -S keeps an editable kvmem out of the way, of each process.
test-checks: setup
	$(BIN)/cmake -S . -B build/checks -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	    -DPython_EXECUTABLE=$(abspath $(BIN))/python -DKVMEM_LLAMA=OFF -DKVMEM_CHECKS=ON -DKVMEM_SANITIZE=ON
	$(BIN)/cmake --build build/checks
	rm -rf build/checks/site && mkdir -p build/checks/site
	cp -r src/kvmem build/checks/site/ && find build/checks/site -name '*.so' -delete
	$(BIN)/cmake --install build/checks --component kvmem --prefix build/checks/site
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	    PYTHONPATH=build/checks/site:$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") \
	    $(BIN)/python -S -m pytest --tx "$(PROCESSES)*popen//python=$(abspath $(BIN))/python -S" --dist worksteal tests/kv

bench: build
	$(BIN)/kvmem bench speed
	$(BIN)/kvmem bench recall

docs: setup
	$(BIN)/python scripts/gen-docs

wheel: setup
	rm -rf dist && mkdir -p dist
	$(PIP) wheel --no-build-isolation --no-deps --no-index --wheel-dir dist .

# What CI does: a source archive of the clone, a wheel of that archive, and every check and test on that wheel.
ci:
	$(MAKE) VENV=$(CI_VENV) check ci-wheel ci-user test-checks test-all

.PHONY: ci-wheel ci-user
ci-wheel: setup
	rm -rf build/ci/dist build/ci/source build/ci/objects && mkdir -p build/ci/dist build/ci/source
	$(BIN)/python -c "from scikit_build_core.build import build_sdist; build_sdist('build/ci/dist')"
	tar -xzmf build/ci/dist/kvmem-*.tar.gz -C build/ci/source --strip-components=1
	$(PIP) wheel --verbose --no-build-isolation --no-deps --no-index --wheel-dir build/ci/dist \
	    --config-settings build-dir=$(abspath build/ci/objects) build/ci/source
	$(PIP) install --quiet --no-deps --no-index --force-reinstall build/ci/dist/kvmem-*.whl

# A user's environment: the wheel with what it declares to need, and nothing else. tests/test_wheel.py runs it.
CI_USER := build/ci/user
USER_PIP := $(CI_USER)/bin/python -m pip --disable-pip-version-check

$(CI_USER)/ready: pyproject.toml scripts/requirements | $(VENV)/ready
	rm -rf $(CI_USER) && $(PYTHON) -m venv $(CI_USER)
	$(REQUIRE) run > $(CI_USER)/requirements.txt
	$(USER_PIP) install --quiet --requirement $(CI_USER)/requirements.txt
	touch $@

ci-user: ci-wheel $(CI_USER)/ready
	$(USER_PIP) install --quiet --no-deps --no-index --force-reinstall build/ci/dist/kvmem-*.whl

# The demo model must be there: what is said of a trained model is not to be skipped.
test-all: export KVMEM_DIST := build/ci/dist
test-all: export KVMEM_TEST_NEEDS_MODEL := 1
test-all: setup
	$(BIN)/kvmem demo-model
	$(PYTEST) $(SIDE_BY_SIDE) -m "not gpu and not alone"
	$(PYTEST) -m "alone and not gpu"

clean:
	rm -rf build dist
