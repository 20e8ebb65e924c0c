PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
CHECKPOINT := checkpoints/softmax-h2-s0
REPORT := reports/softmax-h2-s0
# Whole environments lie outside the checkout, so that clones share them: a folder for each constraints.txt.
ENVS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/mechinterp/$(shell cksum < constraints.txt | cut -d' ' -f1)
# Environments of a few packages that see those of .venv: pip installs what differs, and what it installs comes first.
BESIDE := .venv/beside
# Versions of transformer-lens that still have HookedTransformer.
INTEROP := $(BESIDE)/transformer-lens-3.9.0 $(BESIDE)/transformer-lens-3.2.1
PEERS := $(BESIDE)/peers
TRAINERS := $(BESIDE)/trainers

# Bytecode is kept: two workers and every command that a test starts would otherwise compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help help-all coverage install test test-all test-portable test-portable-short environments test-interop test-peers test-trainers test-versions test-browser test-gpu bench-gpu notebooks notebooks-write lab attack lint bench analyses analyses-check dist docs release report clean

# Targets that `make help` lists; `make help-all` lists the others, too.
COMMON := install test test-all lint bench report notebooks lab docs analyses analyses-check attack coverage dist clean help-all
LISTED = awk -F ':.*\#\# ' -v common=" $(1) " '/^[a-z-]+:.*\#\# / && (common == "  " || index(common, " " $$1 " ")) \
	{printf "make %-19s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

help: ## list the common targets
	@$(call LISTED,$(COMMON))

help-all: ## list all targets
	@$(call LISTED,)

install: $(STAMP) ## put the package and its tools into .venv (needs Python 3.11 or newer)

PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# The package with some extras: by uv in a third of pip's time, or by pip where uv does not find the packages.
with = $(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[$(1)]' 2>/dev/null \
	|| $(PIP) --no-compile -e '.[$(1)]'

# Installed again only when what is asked for has changed. By pip comes torch, whose builds lie where pip was told to look.
# Modules are compiled when they are first imported: most never are.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --no-compile torch uv
	$(call with,dev)
	@touch $@

# Shell for a recipe of several runs of pytest: `run NAME COMMAND...` goes on after a failure, and `summary` ends the
# recipe with what failed in which.
RUNS = set -o pipefail; failed=; log=$$(mktemp); trap 'rm -f $$log' EXIT; trap 'exit 130' INT; \
	run() { name=$$1; shift; echo "== $$name"; "$$@" | tee $$log \
	  || failed+=$$'\n'"== failed: $$name"$$'\n'"$$(grep -E '^(FAILED|ERROR) (tests|mechinterp)' $$log)"; }; \
	summary() { echo "$${failed:-== all passed}"; test -z "$$failed"; };
test test-all test-portable test-portable-short: SHELL := bash

# Shapes and types of signatures are checked where pyproject.toml's own options stand: a test takes twice as long then.
UNCHECKED := -o addopts=--strict-markers
TESTS := tests
EXAMPLES := mechinterp analyses/lib/theory
PYTEST := $(BIN)/python -m pytest -p no:nbmake -n 2 --dist worksteal
FAST := "not slow and not exhaustive"

test: install ## run the examples of all docstrings, the fast and the slow tests, and list at the end what failed
	@$(RUNS) export OMP_NUM_THREADS=1; \
	run "examples" $(PYTEST) $(EXAMPLES); \
	run "fast tests" $(PYTEST) $(UNCHECKED) -m $(FAST) $(TESTS); \
	run "slow tests" $(PYTEST) $(UNCHECKED) -m "slow and not exhaustive" --durations 10 $(TESTS); \
	summary

test-all: test ## the same, all cases of what `make test` runs a sample of, and the fast tests with signatures checked (more than half an hour)
	@$(RUNS) export OMP_NUM_THREADS=1; \
	run "fast tests, signatures checked" $(PYTEST) -m $(FAST) $(TESTS); \
	run "further cases" $(PYTEST) $(UNCHECKED) -m exhaustive --durations 10 $(TESTS); \
	summary

coverage: .venv/.coverage ## run the fast tests and list the lines of the package that none of them runs
	OMP_NUM_THREADS=1 $(BIN)/python -m coverage run --source=mechinterp -m pytest -p no:nbmake -q $(UNCHECKED) -m $(FAST) $(TESTS)
	$(BIN)/python -m coverage report --skip-covered --show-missing

.venv/.coverage: $(STAMP)
	$(PIP) coverage
	@touch $@

# Instruction sets as torch, MKL, oneDNN, the BLAS of numpy and scipy, and numpy itself name them. Numpy warns of a feature
# that it does not know or the processor does not have; what numba compiles is kept in a folder of its own.
DEFAULT := ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41 \
	OPENBLAS_CORETYPE=Nehalem NPY_DISABLE_CPU_FEATURES="X86_V3 X86_V4 AVX512_ICL AVX512_SPR"
AVX2 := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 \
	OPENBLAS_CORETYPE=Haswell NPY_DISABLE_CPU_FEATURES="X86_V4 AVX512_ICL AVX512_SPR"
GENERIC := NUMBA_CPU_NAME=generic NUMBA_CACHE_DIR=$(CURDIR)/.pytest_cache/numba
NUMERIC = $(BIN)/python -m pytest -W ignore::ImportWarning -m $(FAST) $(TESTS)

test-portable: TESTS := $(addprefix tests/,models icl theory analysis training claims) mechinterp
test-portable: install ## run the fast numeric tests under other instruction sets, on one thread and on two
	@$(RUNS) export $(GENERIC); \
	run "default, one thread" env $(DEFAULT) OMP_NUM_THREADS=1 $(NUMERIC) -n 2; \
	run "default, two threads" env $(DEFAULT) OMP_NUM_THREADS=2 $(NUMERIC); \
	run "AVX2, one thread" env $(AVX2) OMP_NUM_THREADS=1 $(NUMERIC) -n 2; \
	run "AVX2, two threads" env $(AVX2) OMP_NUM_THREADS=2 $(NUMERIC); \
	summary

# Tests that compare two ways of computing one thing most closely.
test-portable-short: TESTS := $(addprefix tests/,models/test_transformer.py models/test_linear_attention.py \
	icl/test_predictors.py analysis/test_probes.py analysis/test_masking.py training/test_step.py)
test-portable-short: install ## the same with a few tests
	@$(RUNS) export $(GENERIC); \
	run "default, one thread" env $(DEFAULT) OMP_NUM_THREADS=1 $(NUMERIC) -n 2; \
	run "AVX2, two threads" env $(AVX2) OMP_NUM_THREADS=2 $(NUMERIC); \
	summary

environments: $(addsuffix /.installed,$(INTEROP) $(PEERS)) ## make the environments of test-interop and test-peers

test-interop: install ## exchange files with HookedTransformer of older transformer-lens
	$(MAKE) --no-print-directory -j 2 $(addsuffix /.installed,$(INTEROP))
	OMP_NUM_THREADS=1 INTEROP="$(INTEROP)" $(BIN)/python -m pytest $(UNCHECKED) tests/interop

# Folder of the packages of an environment, printed by its Python.
PACKAGES := -c "import sysconfig; print(sysconfig.get_path('purelib'))"
define beside
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(BIN)/python $(PACKAGES) > $$($(@D)/bin/python $(PACKAGES))/beside.pth
endef

$(BESIDE)/transformer-lens-%/.installed: $(STAMP)
	$(beside)
	@grep -v '^transformer-lens==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $(@D)/constraints.txt transformer-lens==$*
	@touch $@

test-peers: $(PEERS)/.installed ## let nnsight, pyvene and captum drive our hooks, and hook x-transformers
	OMP_NUM_THREADS=1 REQUIRED=1 PYTHONPATH=$(CURDIR) $(PEERS)/bin/python -m pytest $(UNCHECKED) tests/peers

# Not editable: the tests take the package from the checkout they run in.
$(PEERS)/.installed: $(STAMP)
	$(beside)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt '.[peers]'
	@touch $@

test-trainers: $(TRAINERS)/.installed ## run the callbacks in Hugging Face's and Lightning's own trainers
	OMP_NUM_THREADS=1 REQUIRED=1 PYTHONPATH=$(CURDIR) $(TRAINERS)/bin/python -m pytest $(UNCHECKED) tests/trainers

$(TRAINERS)/.installed: $(STAMP)
	$(beside)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt '.[trainers]'
	@touch $@

test-versions: $(ENVS)/uv/bin/uv ## run the fast tests with Python 3.11 to 3.13, lowest and newest versions of all packages
	OMP_NUM_THREADS=1 $(PYTHON) -m scripts.versions $< $(ENVS)

$(ENVS)/uv/bin/uv:
	@$(PYTHON) -m venv $(ENVS)/uv
	@$(ENVS)/uv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv

NOTEBOOKS := notebooks

notebooks: install ## run the notebooks from a clean kernel, and leave the files as they are
	OMP_NUM_THREADS=1 PLOTLY_RENDERER=plotly_mimetype $(BIN)/python -m pytest -n 2 --nbmake $(NOTEBOOKS)

notebooks-write: .venv/.notebooks ## run the notebooks and keep what they show; pictures need Chrome or Chromium
	OMP_NUM_THREADS=1 PLOTLY_RENDERER=plotly_mimetype+png $(BIN)/jupyter nbconvert --to notebook --inplace \
		--execute --ExecutePreprocessor.record_timing=False notebooks/*.ipynb

lab: .venv/.notebooks ## open the notebooks in JupyterLab
	cd notebooks && ../$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root)

.venv/.notebooks: $(STAMP)
	$(call with,notebooks)
	@touch $@

test-browser: .venv/.browser ## open the report in a chromium (by apt where there is none), driven by playwright
	@command -v chromium >/dev/null || { apt-get update --quiet=2 && apt-get install --yes --quiet=2 --no-install-recommends chromium; } || true
	OMP_NUM_THREADS=1 CHROMIUM="$$(command -v chromium)" $(BIN)/python -m pytest -rs $(UNCHECKED) tests/browser

.venv/.browser: $(STAMP)
	$(call with,browser)
	@touch $@

attack: install ## read and write thousands of spoilt files, each within 4 s and 500 MB (ten minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.attack

lint: install ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Without the checks of shapes and types that the tests put around every function.
bench: install ## time the package against plain counterparts, and write tests/benchmarks/README.md
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -o python_files='bench_*.py' \
	  -o addopts='--benchmark-timer=time.process_time --benchmark-disable-gc' \
	  tests/benchmarks --table tests/benchmarks/README.md

# Where the machine has a GPU and PyTorch no CUDA, PyPI's default build takes the place of the CPU build. Without a GPU the
# recipes say so in one line, test nothing, write nothing, and end with 0, as skipped tests do.
GPU = $(BIN)/python -m tests.gpu.machine; code=$$?; \
	if [ $$code = 3 ]; then \
	  $(BIN)/python -m pip uninstall --quiet --yes torch && \
	  $(PIP) torch && \
	  $(BIN)/python -m tests.gpu.machine; code=$$?; \
	fi; \
	[ $$code != 77 ] || exit 0; [ $$code = 0 ] || exit 2;

test-gpu: install ## hold training and analyses on a CUDA GPU against the processor, and write tests/gpu/results.md
	@$(GPU) OMP_NUM_THREADS=1 MECHINTERP_TEST_DEVICE=cuda MECHINTERP_TEST_TABLE=tests/gpu/results.json \
	  $(BIN)/python -m pytest -n 4 --durations 5 tests/gpu

bench-gpu: install ## time training and masking on a CUDA GPU against the plain loop there, and write tests/gpu/speed.md
	@$(GPU) $(BIN)/python -m tests.gpu.bench --out tests/gpu/speed.json

analyses: install ## measure the papers' claims again from the shipped checkpoints
	$(BIN)/python -m analyses | OMP_NUM_THREADS=1 xargs -n 1 -P 2 $(BIN)/python -m analyses
	$(BIN)/python -m analyses.lib.pages

analyses-check: install ## measure again what takes seconds of the papers' claims, label the calibration models again, and compare (two minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m analyses.lib.check $(CHECK)

dist: .venv/.dist ## build the wheel and the source archive into dist/, and check them
	rm -rf dist
	$(BIN)/python -m build --no-isolation --quiet .
	$(BIN)/python -m twine check --strict dist/*

.venv/.dist: $(STAMP)
	$(call with,dist)
	@touch $@

docs: .venv/.docs ## build the documentation site into build/site; any warning or lost formula is an error
	NO_MKDOCS_2_WARNING=1 OMP_NUM_THREADS=1 $(BIN)/python -m mkdocs build --quiet --strict
	SITE=build/site $(BIN)/python -m pytest --quiet tests/site

.venv/.docs: $(STAMP)
	$(call with,docs)
	@touch $@

VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' mechinterp/version.py)

release: ## tag this commit, and put wheel, source archive and site into release/
	@test -z "$$(git status --porcelain)" || { echo "release: the tree has changes; commit them first." >&2; exit 2; }
	@grep -q '^## $(VERSION) ' CHANGELOG.md || { echo "release: CHANGELOG.md has no section $(VERSION)." >&2; exit 2; }
	@! git rev-parse --quiet --verify refs/tags/v$(VERSION) >/dev/null \
	  || { echo "release: the tag v$(VERSION) is there; raise mechinterp/version.py." >&2; exit 2; }
	$(MAKE) analyses-check test-portable-short notebooks dist docs
	rm -rf release && mkdir release && cp dist/* release
	cd build && $(CURDIR)/$(BIN)/python -m zipfile -c $(CURDIR)/release/mechinterp_icl-$(VERSION)-site.zip site
	git tag --annotate --message "mechinterp $(VERSION)" v$(VERSION)
	@echo "release/ is ready to be uploaded:"; ls release

report: install ## set up, write the page about a model of two heads, and say where it is
	$(BIN)/mechinterp report $(CHECKPOINT) --out $(REPORT) --overwrite

clean: ## delete caches and reports; .venv stays
	rm -rf reports .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist release *.egg-info
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
