# The two commands of the README, and what a maintainer needs. Works with the make and the shell that macOS ships.

SHELL := /bin/sh
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --no-input
PIP_LOCKED := $(PIP) install --require-hashes --no-build-isolation
PYTHON = $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
PROMPT = What is the capital of France, and what is it known for?

# As it was typed: a dollar sign in it is no variable of make's, a quote none of the shell's.
DEMO_PROMPT := $(value PROMPT)
export DEMO_PROMPT
unexport PROMPT

.PHONY: help run test lint fmt lock bench bench-compare clean

help:
	@echo 'make run    install, fetch the demo model, stream an answer   (PROMPT="..." asks something else)'
	@echo 'make test   install the test tools too, then lint, types and every test'
	@echo 'make lint   ruff and mypy alone          make fmt    format the code'
	@echo 'make lock   renew the locks (needs uv)   make clean  remove what these made'
	@echo 'make bench  measure (ONLY=name,name QUICK=1); make bench-compare A=... B=... compares two runs or commits'

run: $(VENV)/.run
	@OMLXD_HOME="$(CURDIR)/.omlxd" $(VENV)/bin/python -m omlxd.cli.demo "$$DEMO_PROMPT"

# Two at a time: many tests wait for processes they have started. By file, so that what a file shares is made once.
test: lint
	$(VENV)/bin/pytest -n 2 --dist loadfile

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# docs/benchmarks.md says what is measured. All of it takes about half an hour and renews docs/benchmarks/latest.*.
bench: $(VENV)/.test
	$(VENV)/bin/python -m tests.bench --only "$(ONLY)" --under "$(UNDER)" $(if $(QUICK),--quick) \
		$(if $(OUT),--out "$(OUT)")

bench-compare: $(VENV)/.test
	$(VENV)/bin/python -m tests.bench.compare "$(A)" "$(B)"

fmt: $(VENV)/.test
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(VENV)/.python:
	@test -n "$(PYTHON)" || { echo "omlxd needs Python 3.11 or newer and finds none. Install one (on a Mac:" \
		"brew install python@3.13), or name yours: make run PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.run: $(VENV)/.python requirements-build.lock requirements.lock pyproject.toml
	$(PIP) install --require-hashes -r requirements-build.lock
	$(PIP_LOCKED) -r requirements.lock
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.run requirements-test.lock
	$(PIP_LOCKED) -r requirements-test.lock
	@touch $@

# One lock for macOS and Linux and every Python from 3.11; versions that are locked stay unless pyproject.toml forbids.
UV_COMPILE = uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header

lock:
	@command -v uv >/dev/null || { echo 'make lock needs uv: pip install uv'; exit 1; }
	$(UV_COMPILE) --group build -o requirements-build.lock
	$(UV_COMPILE) pyproject.toml -o requirements.lock
	$(UV_COMPILE) --extra test --constraint requirements.lock pyproject.toml -o requirements-test.lock

clean:
	rm -rf $(VENV) .omlxd .cache-models build dist src/omlxd.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
