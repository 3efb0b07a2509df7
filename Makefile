# `make` alone lists the targets. Everything is installed into .venv; the system is left as it is.
# To use an environment of your own instead (a container with its own torch, say): make test PY=python

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help venv venv-latest has-latest prepare quickstart test test-latest lint docs format bench bench-pipeline gpu-check gpu-bench gpu-memory gpu-profile clean

PYTHON ?=
PYTEST_ARGS ?=
PREDICTED ?= benchmarks/results/gpu-memory-predicted-h100-h200.json
BOOTSTRAP := $(shell command -v python3 || command -v python)

ifeq ($(origin PY), undefined)
PY := .venv/bin/python
VENV_TARGET := venv
endif

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do printf '  %-12s %s\n' "$$name" "$$text"; done

venv:  ## .venv with the package and its tools (Python 3.11 or newer; PYTHON=... to choose)
	@$(BOOTSTRAP) tools/setup_venv.py .venv --versions 3.11 3.12 3.13 $(if $(PYTHON),--python $(PYTHON))

venv-latest:
	@$(BOOTSTRAP) tools/setup_venv.py .venv312 --versions 3.12

has-latest:
	@$(BOOTSTRAP) tools/setup_venv.py .venv312 --versions 3.12 --probe

prepare: $(VENV_TARGET)  ## the quickstart's backbone and data, in .quickstart/
	@$(PY) examples/quickstart/prepare.py

quickstart: prepare  ## fine-tune four tasks on one backbone: minutes on two cores
	@PYTHON_BIN=$(PY) bash examples/quickstart/run.sh

test: prepare  ## every test, on one and on several processes
	@$(PY) tests/run.py $(PYTEST_ARGS)

test-latest: prepare venv-latest  ## the same with Python 3.12 and the newest Megatron-Core
	@.venv312/bin/python tests/run.py $(PYTEST_ARGS)

lint: $(VENV_TARGET)  ## ruff, mypy, and the layers of packages
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -c "from importlinter.cli import lint_imports_command as run; run()"

docs: $(VENV_TARGET)  ## the documentation as HTML, in docs/_build; a broken link is an error
	$(PY) -m sphinx -W --keep-going -q -c docs -b html . docs/_build

format: $(VENV_TARGET)  ## let ruff lay out and mend what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: prepare  ## megatron-mux against Hugging Face PEFT, one task at a time, on this machine
	$(PY) benchmarks/vs_peft.py

gpu-check: $(VENV_TARGET)  ## tests/gpu, and 17 cases on the GPU against the CPU: three minutes (repeat to go on)
	$(PY) benchmarks/gpu_sitting.py check

bench-pipeline: $(VENV_TARGET)  ## two stages on two cores: against Megatron-Core's 1F1B, and policies
	$(PY) benchmarks/pipeline.py
	$(PY) benchmarks/policies.py --stages 2

gpu-bench: $(VENV_TARGET)  ## the table on a GPU against the fastest PEFT: six minutes (repeat to go on)
	$(PY) benchmarks/gpu_sitting.py bench

gpu-memory: $(VENV_TARGET)  ## memory on a GPU, held against PREDICTED: three minutes (repeat to go on)
	@mkdir -p .gpu-sitting
	$(PY) benchmarks/gpu_memory.py measure --minutes 3 --predicted $(PREDICTED) --output .gpu-sitting/memory.json

gpu-profile: $(VENV_TARGET)  ## the planner's profile of a GPU, and seconds of steps, predicted and measured: two minutes
	$(PY) benchmarks/gpu_sitting.py profile

clean:  ## remove environments, caches and the quickstart's folder
	rm -rf .venv .venv312 .quickstart docs/_build build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
