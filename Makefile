# `make demo` and `make test` work on a fresh machine with Python 3.11+: they set up a virtual environment first.
PYTHON ?= python3
VENV ?= .venv
.PHONY: setup demo test test-soak test-gpu check docs wheel

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml setup.py constraints-cpu.txt scripts/torch_index.py
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q $$($(VENV)/bin/python scripts/torch_index.py) -e '.[dev]'
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

# The site, with the API's reference: site/index.html
docs: setup
	$(VENV)/bin/python -m pip install -q -e '.[docs]'
	$(VENV)/bin/mkdocs build --strict

# What is published: dist/
wheel: setup
	$(VENV)/bin/python -c "from setuptools import build_meta as build; build.build_sdist('dist'); build.build_wheel('dist')"
