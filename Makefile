# Everything a person does here; `make` alone lists it.
# Each target sets up .venv first when requirements.lock or pyproject.toml changed.

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.millrace-setup
CLASSES := $(VENV)/.millrace-classes
NAME  ?= clone
ARGS  ?=
WHAT  ?= clone
# Files of tests that run at a time. Tests wait a third of their time, so more than there are cores.
WORKERS ?= 3
MINUTES ?= 10
SEED  ?=

.DEFAULT_GOAL := help
.PHONY: help setup java demo test check lint types contracts format bench torture lock clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) java $(CLASSES) ## Create .venv with the locked packages and this project

demo: setup ## Copy a demo database between two embedded servers (ARGS="--help")
	$(BIN)/millrace demo $(ARGS)

test: setup lint types contracts ## Lint, types, import contracts and all tests (ARGS="-k name" WORKERS=3)
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(STAMP) lint types contracts ## Lint, types, import contracts and the unit tests: the quick round
	$(BIN)/pytest tests/unit $(ARGS)

lint: $(STAMP) ## Style of the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## Types, strictly
	$(BIN)/mypy

contracts: $(STAMP) ## Which package may import which
	$(BIN)/lint-imports

format: $(STAMP) ## Rewrite the code in our format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## Run one benchmark (NAME=clone ARGS="...")
	$(BIN)/python -m bench $(NAME) $(ARGS)

torture: setup ## Interrupt clones, streams (WHAT=follow), tubes (tube), ten sources (consolidate) clones with nothing prepared (resume) or decode WAL (decode) for MINUTES=10 and compare each (SEED=1 repeats one; ARGS="--help")
	$(BIN)/python -m tests.torture --what $(WHAT) --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

# Universal: one lock for Python 3.11 to 3.13 on every platform. Only the
# package index is asked, never a local folder of wheels: the hashes must be
# those of all published files.
lock: $(STAMP) ## Write requirements.lock again from pyproject.toml
	@uv=$$(command -v uv) || { $(BIN)/pip install --quiet uv && uv=$(BIN)/uv; }; \
	"$$uv" pip compile --quiet --no-config --upgrade --universal --python-version 3.11 \
	    --generate-hashes --no-emit-index-url --no-emit-find-links --strip-extras \
	    --extra demo --group dev --custom-compile-command "make lock" \
	    --output-file requirements.lock pyproject.toml
	@! grep -n '://' requirements.lock

clean: ## Remove .venv and everything that was built
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf spark-warehouse metastore_db derby.log
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The first of these that is Python 3.11 to 3.13; a pyenv shim may exist and not run.
PYTHONS := $(PYTHON) python3 python3.13 python3.12 python3.11

$(STAMP): requirements.lock pyproject.toml
	@python=; for candidate in $(PYTHONS); do \
	    if $$candidate -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	        2>/dev/null; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "Python 3.11, 3.12 or 3.13 is needed; name it with: make setup PYTHON=/path/to/python3" >&2; \
	    exit 1; \
	fi; \
	set -e; \
	if command -v uv >/dev/null; then \
	    [ -x $(BIN)/python ] || uv venv --python "$$($$python -c 'import sys; print(sys.executable)')" $(VENV); \
	    install="uv pip install --python $(BIN)/python"; \
	else \
	    [ -x $(BIN)/python ] || $$python -m venv $(VENV); \
	    install="$(BIN)/python -m pip install --disable-pip-version-check"; \
	fi; \
	$$install --require-hashes -r requirements.lock; \
	$$install --no-deps --no-build-isolation -e .
	@touch $@

# Once: Spark's classes in a form that Java loads faster, and machine code of our own byte loops.
# Both save seconds at every start.
$(CLASSES): $(STAMP) | java
	$(BIN)/python -m millrace.spark.java
	$(BIN)/python -m millrace.apply.warm_up
	@touch $@

# Spark 4 runs on Java 17 and newer. `java -version` says "17.0.15", or "1.8.0" when it is old.
java:
	@java="$${JAVA_HOME:+$$JAVA_HOME/bin/}java"; \
	major=$$("$$java" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -n 1); \
	if [ "$${major:-0}" -lt 17 ]; then \
	    { echo "Java 17 or newer is needed by Spark; $$java gives: $${major:-nothing}"; \
	      echo "  Debian, Ubuntu   sudo apt install openjdk-17-jre-headless"; \
	      echo "  Fedora, RHEL     sudo dnf install java-17-openjdk-headless"; \
	      echo "  macOS            brew install openjdk@17"; \
	      echo "then set JAVA_HOME if java is not on the PATH."; } >&2; \
	    exit 1; \
	fi
