# One command per intent. `make run` and `make test` set up all they need on a Debian machine that has only
# python3, make and root's apt; without root they print the command to type.
PYTHON ?= python3
BIN := .venv/bin
UNITS ?=
N ?= 2

.PHONY: run test check format lock bench vllm-units clean help

help:            ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile

run: .venv/run.ready             ## two simulated cells and the gate, in the foreground (UNITS="http://…" for real ones)
	@$(BIN)/python -m loadtests.run $(UNITS)

test: .venv/dev.ready            ## every test
	@$(BIN)/python -m pytest

check: .venv/dev.ready           ## format, lint, types, import rules
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest tests/unit/test_imports.py

format: .venv/dev.ready          ## rewrite what `make check` would refuse
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

vllm-units: .venv/run.ready      ## N real vLLM leader/follower units on this machine's CPU
	@$(BIN)/python -m loadtests.vllm_unit --units $(N)

bench: .venv/run.ready           ## CPU of the gate beside HAProxy, interleaved
	@$(BIN)/python -m loadtests.bench

lock: .venv/bin/python           ## resolve the dependencies anew
	@$(BIN)/python -m pip install -q uv
	@$(BIN)/uv pip compile pyproject.toml $(LOCK) -o requirements.lock
	@$(BIN)/uv pip compile pyproject.toml --all-extras $(LOCK) -o requirements-dev.lock

LOCK := -q --upgrade --generate-hashes --universal --python-version 3.11 --no-emit-index-url --no-annotate --no-header

.venv/run.ready: .venv/bin/python requirements.lock pyproject.toml
	@$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -e .
	@touch $@

.venv/dev.ready: .venv/run.ready requirements-dev.lock
	@$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements-dev.lock
	@touch $@

.venv/bin/python:
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(MAKE) -s apt PACKAGES=python3-venv
	@$(PYTHON) -m venv .venv

.PHONY: apt
apt:
	@if [ "$$(id -u)" = 0 ]; then apt-get update -qq && apt-get install -y -qq --no-install-recommends $(PACKAGES); \
	else echo "cellgate needs Debian's $(PACKAGES). Type:  sudo apt-get install -y $(PACKAGES)" >&2; exit 1; fi

clean:           ## remove what make made
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
