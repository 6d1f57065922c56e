# pg_queen. `make help` lists the targets; tools/ holds what they call.

# pg_config of the PostgreSQL to build for. Debian's own /usr/bin/pg_config may belong to another version.
PG_MAJOR ?= 15
PG_CONFIG ?= $(firstword $(wildcard /usr/lib/postgresql/$(PG_MAJOR)/bin/pg_config) pg_config)
export PG_MAJOR PG_CONFIG

VERSION := $(shell sed -n "s/^default_version *= *'\(.*\)'/\1/p" extension/pg_queen.control)
SCRIPT := extension/pg_queen--$(VERSION).sql
SOURCES := $(sort $(wildcard sql/*.sql))
# The upgrade steps; the built script has no second `--`.
STEPS := $(wildcard extension/pg_queen--*--*.sql)
DESTINATION = $(DESTDIR)$(shell $(PG_CONFIG) --sharedir)/extension

PYTHON := .local/venv/bin/python
# What needs only the standard library works before `make setup` too.
ANY_PYTHON = $(firstword $(wildcard $(PYTHON)) python3)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup build install uninstall demo up down test lint format bench chaos clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | awk -F '\t' '{ printf "  make %-10s %s\n", $$1, $$2 }'

setup: ## install missing packages (as root) and the virtual environment
	@tools/setup.sh dev

build: $(SCRIPT) ## concatenate sql/*.sql into the extension's script

# Depends on the directory too, so that a file that was removed leaves the script. Written beside and renamed, because
# somebody may be installing it at this moment.
$(SCRIPT): $(SOURCES) sql extension/pg_queen.control
	@cat $(SOURCES) > $@.$$PPID && mv $@.$$PPID $@

install: build ## install the extension into the directories of pg_config (PG_CONFIG=, DESTDIR=)
	install -d '$(DESTINATION)'
	install -m 644 extension/pg_queen.control $(SCRIPT) $(STEPS) '$(DESTINATION)'

uninstall: ## remove what install put there
	rm -f '$(DESTINATION)/pg_queen.control' '$(DESTINATION)'/pg_queen--*.sql

demo: build ## install what is missing, start a server of its own, show timers fire, check every one
	@tools/setup.sh
	@$(PYTHON) -m tools.demo

up: build ## the demo's server and extension, without the demo
	@tools/setup.sh
	@$(PYTHON) -m tools.demo --up

down: ## stop the demo's server
	@$(ANY_PYTHON) -m tools.cluster down

test: setup build ## the whole suite on a server of its own (PYTEST_ARGS=)
	@$(PYTHON) -m pytest --numprocesses 2 --dist loadfile $(PYTEST_ARGS)

lint: setup ## formatting, linting and types of Python, rules of SQL, pgspot, shell scripts
	.local/venv/bin/ruff format --check .
	.local/venv/bin/ruff check .
	.local/venv/bin/mypy
	cd python && ../.local/venv/bin/mypy
	$(PYTHON) -m tools.lint_sql
	$(PYTHON) -m tools.lint_pgspot
	@if command -v shellcheck >/dev/null; then set -x; shellcheck .ci/run tools/*.sh; else echo 'no shellcheck here: left out'; fi

format: setup ## let ruff format the Python files
	.local/venv/bin/ruff format .

bench: setup build ## measure; prints machine, versions and settings with the figures (BENCH_ARGS=)
	@$(PYTHON) -m tests.bench $(BENCH_ARGS)

chaos: setup build ## faults under load, judged from what clients wrote down (CHAOS_ARGS=)
	@$(PYTHON) -m tests.chaos $(CHAOS_ARGS)

clean: ## stop the demo's server and remove everything that was made here
	@$(ANY_PYTHON) -m tools.cluster remove
	rm -rf .local $(filter-out $(STEPS),$(wildcard extension/pg_queen--*.sql)) python/dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
