# One command each; `make help` lists them. Nothing but Python 3.11 or newer and make is needed.

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup serve test check soak bench clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Make .venv and install the pinned dependencies

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || { echo "make: $(PYTHON) is not Python 3.11 or newer; name one with PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "make: $(PYTHON) has no venv module; install it (Debian, Ubuntu: python3-venv)" >&2; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

serve: setup  ## Serve a model; ARGS="--model ..." goes to `pdserve up`
	@exec $(VENV)/bin/pdserve up $(ARGS)

test: setup  ## Run the tests; ARGS="-k name" goes to pytest
	$(VENV)/bin/python -m pytest -m 'not gpu and not soak' $(ARGS)

check: setup  ## Lint, format, types, fresh generated code, rules of the repository
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy .
	$(VENV)/bin/python -m protos.generate --check
	$(VENV)/bin/python -m pytest -q tests/repo

soak: setup  ## The long tests with full counts
	$(VENV)/bin/python -m pytest -m soak $(ARGS)

bench: setup  ## Load a server that runs; ARGS goes to `pdserve bench`
	@exec $(VENV)/bin/pdserve bench $(ARGS)

clean:  ## Remove .venv and everything that can be made again
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
