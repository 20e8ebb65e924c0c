PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
CHECKPOINT := checkpoints/softmax-h2-s0
REPORT := reports/softmax-h2-s0

.PHONY: help install test lint report clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## put the package and its tools into .venv (needs Python 3.11 or newer)

# Installed again only when what is asked for has changed.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

test: install ## run all tests: the fast ones, then the slow ones, on two cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow --durations 10

lint: install ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

report: install ## write the page about a two-head model, and say where it is
	$(BIN)/mechinterp report $(CHECKPOINT) --out $(REPORT) --overwrite

clean: ## delete caches and reports; .venv stays
	rm -rf reports .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
