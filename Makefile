# `make demo` and `make test` work on a fresh machine with Python 3.11+: they set up a virtual environment first.
PYTHON ?= python3
VENV ?= .venv
PYTEST = $(VENV)/bin/python -m pytest
CPU = not gpu and not multi_gpu and not ray and not soak
# More than cores: tests wait for processes and threads as long as they compute.
WORKERS ?= 3
LONGEST_FIRST = tests/process tests/fault tests/docs tests/inproc tests/unit tests/gpu
ALONE = $$(grep -rl --include='*.py' mark.alone tests)
.PHONY: setup demo test test-all test-lowest test-fast test-soak test-gpu test-cluster test-browser check docs wheel

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml setup.py constraints-cpu.txt scripts/torch_index.py
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q $$($(VENV)/bin/python scripts/torch_index.py) -e '.[dev]'
	touch $@

demo: setup
	$(VENV)/bin/symbiosis demo

# One test for each promise and transport, of what needs no GPU; tests that measure time come last, one by one. What fails beside others is
# tried once more by itself, and has failed if it fails again: some tests wait for threads and processes, which a busy machine may hold up.
# Where Python may not write bytecode, each process would compile all again, so that is done first; and each worker would rewrite all asserts,
# so that figures of failed ones are shown where they are tried again: here, the values of names are.
test: MARKED = $(CPU) and not full
test-all: MARKED = $(CPU)
test test-all: setup
	$(VENV)/bin/python -m compileall -q symbiosis tests scripts
	$(PYTEST) --assert=plain --showlocals -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "$(MARKED) and not alone" $(LONGEST_FIRST) || { test $$? = 1 && $(PYTEST) -m "$(MARKED) and not alone" --last-failed; }
	$(PYTEST) -m "$(MARKED) and alone" $(ALONE) || { test $$? = 1 && $(PYTEST) -m "$(MARKED) and alone" --last-failed $(ALONE); }

# The same tests in an environment of the lowest releases that pyproject.toml allows, before a release, as test-all is run with the newest.
test-lowest:
	PIP_CONSTRAINT=$(CURDIR)/constraints-lowest.txt $(MAKE) test VENV=.venv-lowest

# What one runs all day: no test of these starts a process or takes long.
test-fast: setup
	$(PYTEST) -n $(WORKERS) --dist loadfile -m "$(CPU) and not full and not alone and not long" tests/unit tests/inproc

test-soak: setup
	$(PYTEST) -m soak

test-gpu: setup
	$(PYTEST) -m "gpu or multi_gpu"

# A cluster on Ray, with two nodes of this host.
test-cluster: setup
	$(VENV)/bin/python -m pip install -q $$($(VENV)/bin/python scripts/torch_index.py) -e '.[dev,ray]'
	$(PYTEST) -m ray

# The page of `symbiosis serve` in Debian's Chromium, which `make test` opens, too, where it is installed.
test-browser: setup
	which chromium chromedriver || { apt-get update && apt-get install -y chromium chromium-driver; }
	$(PYTEST) -m browser

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
