PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
CHECKPOINT := checkpoints/softmax-h2-s0
REPORT := reports/softmax-h2-s0
# Versions of transformer-lens that still have HookedTransformer, each in an environment of its own.
INTEROP := .venv-interop/3.9.0 .venv-interop/3.2.1

.PHONY: help install test test-interop test-peers test-browser notebooks notebooks-write lab fuzz lint bench analyses report clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## put the package and its tools into .venv (needs Python 3.11 or newer)

# Installed again only when what is asked for has changed.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

test: install ## run all tests: the fast ones, then the slow ones, on two cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow --durations 10

test-interop: install ## exchange files with HookedTransformer of older transformer-lens
	$(MAKE) --no-print-directory -j 2 $(INTEROP:=/.installed)
	OMP_NUM_THREADS=1 INTEROP="$(INTEROP)" $(BIN)/python -m pytest tests/interop

.venv-interop/%/.installed: constraints.txt
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@grep -v '^transformer-lens==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $(@D)/constraints.txt torch
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $(@D)/constraints.txt transformer-lens==$*
	@touch $@

test-peers: .venv-peers/.installed ## let nnsight, pyvene and captum drive our hooks, in .venv-peers
	OMP_NUM_THREADS=1 PEERS=required .venv-peers/bin/python -m pytest tests/peers

.venv-peers/.installed: pyproject.toml constraints.txt
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,peers]'
	@touch $@

notebooks: install ## run the notebooks from a clean kernel, and leave the files as they are
	OMP_NUM_THREADS=1 PLOTLY_RENDERER=plotly_mimetype $(BIN)/python -m pytest -n 2 --nbmake notebooks

notebooks-write: .venv/.notebooks ## run the notebooks and keep what they show; pictures need Chrome or Chromium
	OMP_NUM_THREADS=1 PLOTLY_RENDERER=plotly_mimetype+png $(BIN)/jupyter nbconvert --to notebook --inplace \
		--execute --ExecutePreprocessor.record_timing=False notebooks/*.ipynb

lab: .venv/.notebooks ## open the notebooks in JupyterLab
	cd notebooks && ../$(BIN)/jupyter lab

.venv/.notebooks: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,notebooks]'
	@touch $@

test-browser: .venv/.browser ## open the report in a chromium (by apt where there is none), driven by playwright
	@command -v chromium >/dev/null || { apt-get update --quiet=2 && apt-get install --yes --quiet=2 --no-install-recommends chromium; } || true
	OMP_NUM_THREADS=1 CHROMIUM="$$(command -v chromium)" $(BIN)/python -m pytest -rs tests/browser

.venv/.browser: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,browser]'
	@touch $@

fuzz: install ## read 20,000 mutated files of each format (about half an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.checkpoints.fuzz 20000

lint: install ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Without the checks of shapes and types that the tests put around every function.
bench: install ## time the package against plain counterparts, and write tests/benchmarks/README.md
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -o python_files='bench_*.py' \
	  -o addopts='--benchmark-timer=time.process_time --benchmark-disable-gc' \
	  tests/benchmarks --table tests/benchmarks/README.md

analyses: install ## measure the papers' claims again from the shipped checkpoints
	grep -l '^    run(measure' analyses/*.py | OMP_NUM_THREADS=1 xargs -n 1 -P 2 $(BIN)/python
	$(BIN)/python analyses/emergence_prediction.py
	$(BIN)/python analyses/claims_table.py
	$(BIN)/python analyses/sparse_table.py

report: install ## write the page about a two-head model, and say where it is
	$(BIN)/mechinterp report $(CHECKPOINT) --out $(REPORT) --overwrite

clean: ## delete caches and reports; .venv stays
	rm -rf reports .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
