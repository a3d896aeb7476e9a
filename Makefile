# `make demo` and `make test` work on a fresh machine with Python 3.11+: they set up a virtual environment first.
PYTHON ?= python3
VENV ?= .venv
# On a machine without an NVIDIA GPU, torch's CPU build is enough (and gigabytes smaller).
CONSTRAINTS := $(shell command -v nvidia-smi >/dev/null 2>&1 || echo -c constraints-cpu.txt)

.PHONY: setup demo test test-soak test-gpu check

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints-cpu.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q $(CONSTRAINTS) -e '.[dev]'
	touch $@

demo: setup
	$(VENV)/bin/symbiosis demo

test: setup
	$(VENV)/bin/python -m pytest -m "not gpu and not multi_gpu and not soak"

test-soak: setup
	$(VENV)/bin/python -m pytest -m soak

test-gpu: setup
	$(VENV)/bin/python -m pytest -m "gpu or multi_gpu"

check: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
