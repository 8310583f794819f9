# Every target but `clean` does all set-up itself: a virtual environment in .venv with the exact tested packages.
# `make PYTHON=python3.13 ...` chooses the interpreter, `make EXTRA_PIP="--index-url ..." ...` adds options of pip or uv.

candidates := python3 python3.14 python3.13 python3.12 python3.11
PYTHON ?= $(firstword $(foreach p,$(candidates),$(shell $(p) -c 'import sys; sys.version_info >= (3, 11) and print("$(p)")' 2>/dev/null)))
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
DOCS_INSTALLED := $(VENV)/installed-docs
ROOMS := tasks model_adapters reports
TEST_WORKERS ?= 2
TESTS ?= tests
N ?= 10000
SEED ?= 0
FIRST ?= 0
KILLS ?= 50
REAL ?= real
VLLM ?= .venv-vllm

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-machines census docs fuzz test-browser test-ray kills surroundings families check lint types tree editor bench hub-kernel real vllm engines clean

help:
	@echo "make demo          evaluate the two shipped checkpoints, write report/index.html"
	@echo "make test          run the tests that find most faults, in about five minutes; TESTS=... names some, TEST_WORKERS=... processes"
	@echo "make test-all      run all tests: those of make test, then the rest"
	@echo "make test-machines run the tests that multiply matrices as other processors would; ROWS=... names some rows"
	@echo "make census        print files, lines and modules of the product"
	@echo "make fuzz          read N=10000 damaged files of every kind; SEED=..., FIRST=... and KIND=typed choose which"
	@echo "make test-browser  run the tests of the page in headless chromium"
	@echo "make test-ray      run the tests of sweeps on a Ray cluster of three nodes on this machine"
	@echo "make kills         kill every command that writes at random moments; KILLS=... of each, COMMANDS=... names some"
	@echo "make surroundings  run them with a full disk, no home and the like; COMMANDS=... names some"
	@echo "make families      tiny models of transformers' families against whole texts, as a table; FAMILIES=... names some"
	@echo "make real          download SmolLM2-135M with pip and evaluate it past its 8,192 tokens; WIKITEXT=... and ESSAYS=... name more text"
	@echo "make vllm          score the same model with hf, sb, vLLM and vLLM's server, as a table"
	@echo "make engines       ask a resolver whether sbeval installs beside vLLM and SGLang"
	@echo "make docs          build the site into build/site, without a network once its packages are there"
	@echo "make check         lint, formatting and types"
	@echo "make editor        lay build/tree/sbeval out as the package installs, so that editors follow its imports"
	@echo "make bench         measure what this machine can measure (benchmarks/)"
	@echo "make hub-kernel    lay attention out as a package of the kernels hub in build/stickbreaking"
	@echo "make setup         only install into .venv"
	@echo "make clean         remove what the other targets made, results and report included"

INSTALL = EXTRA_PIP="$(EXTRA_PIP)" .ci/environment $(BIN)/python

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt setup.py
	@test -n "$(PYTHON)" || { echo "Expected Python 3.11 or newer, found none: install one, or name it with make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25"
	@echo "installing the packages of constraints.txt into $(VENV); this takes some minutes the first time"
	$(INSTALL) --constraint constraints.txt --editable ".[dev]"
	$(BIN)/sbeval install-plugin
	@touch $@

demo: $(INSTALLED)
	$(BIN)/sbeval demo

# images of containers switch bytecode off: every process would then compile the tree again
test: $(INSTALLED)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n $(TEST_WORKERS) -m "not exhaustive" $(TESTS)

# pytest's exit code 5: none of TESTS is left to run
test-all: test
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n $(TEST_WORKERS) -m exhaustive $(TESTS) || test $$? = 5

test-machines: $(INSTALLED)
	$(BIN)/python tests/measures/machines.py --workers $(TEST_WORKERS) $(ROWS)

census: $(INSTALLED)
	@$(BIN)/python tests/measures/census.py

# A broken link fails. The packages are installed once, beside those of the tests.
docs: $(DOCS_INSTALLED) tree
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "open file://$(CURDIR)/build/site/index.html in a browser"

$(DOCS_INSTALLED): $(INSTALLED)
	$(INSTALL) --constraint constraints.txt --editable ".[docs]"
	@touch $@

fuzz: $(INSTALLED)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONPATH=.:tests/support nice $(BIN)/python -m tests.fuzz $(N) --seed $(SEED) --first $(FIRST) --kind "$(KIND)"

# Debian's chromium is the browser, so playwright downloads none.
test-browser: $(INSTALLED)
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || { echo "Expected chromium, found none: apt-get install chromium" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet $(EXTRA_PIP) --constraint constraints.txt playwright
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/browser

# ray is an extra (sbeval[ray]), so that nobody pays for it who does not use it
test-ray: $(INSTALLED)
	$(BIN)/python -m pip install --quiet $(EXTRA_PIP) --constraint constraints.txt ray
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 0 tests/sweep/test_ray.py

# KILLS of each command at random moments; COMMANDS=... names some of run, sweep, train, extend, convert, report, demo
# and caches, a run whose tasks keep what they compute
kills: $(INSTALLED)
	$(BIN)/python tests/kills/kills.py --kills $(KILLS) $(COMMANDS)

# the same commands in 30 surroundings each: a full disk, no home, little memory, a closed pipe, another process
surroundings: $(INSTALLED)
	$(BIN)/python tests/kills/surroundings.py $(COMMANDS)

# every family with a cache, layers or positions of its own kind: some 20 minutes; the most used are among the tests, all run each night
families: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python tests/measures/families.py $(FAMILIES)

# The weights stay in real/, outside git. A CPU reads four documents in some ten minutes; a GPU runs every group.
# MODEL=gemma3 takes Gemma 3 270M, whose terms are printed.
MODEL ?= smollm2
real: $(REAL)/$(MODEL)/config.json $(REAL)/texts/docstrings.jsonl
	$(BIN)/python -m research.real_models.evaluate $(REAL)/$(MODEL) --texts $(REAL)/texts --out $(REAL)/$(MODEL)-evaluated
	$(BIN)/sbeval report $(REAL)/$(MODEL)-evaluated/results -o $(REAL)/$(MODEL)-report

$(REAL)/%/config.json: $(INSTALLED)
	$(BIN)/python -m pip install --quiet $(EXTRA_PIP) --no-deps gguf==0.19.0
	$(BIN)/python -m research.real_models.checkpoints $* $(REAL)/$*
	@touch $@

$(REAL)/texts/docstrings.jsonl: $(INSTALLED)
	$(BIN)/python -m research.real_models.texts $(REAL)/texts $(if $(WIKITEXT),--wikitext $(WIKITEXT)) $(if $(ESSAYS),--essays $(ESSAYS))

# vLLM holds other versions than the tests, so it gets an environment of its own (2.9 GB)
vllm: $(REAL)/smollm2/config.json $(REAL)/texts/docstrings.jsonl $(VLLM)/installed
	$(VLLM)/bin/python -m research.real_models.engines $(REAL)/smollm2 --text $(REAL)/texts/modules.jsonl.gz --out $(REAL)/engines

$(VLLM)/installed: pyproject.toml research/real_models/vllm_environment.sh
	PYTHON=$(PYTHON) EXTRA_PIP="$(EXTRA_PIP)" research/real_models/vllm_environment.sh $(VLLM)
	@touch $@

engines:
	PYTHON=$(PYTHON) .ci/engines

check: lint types

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

hub-kernel: $(INSTALLED)
	$(BIN)/python hub/lay_out.py build/stickbreaking

# Type checkers and editors follow a package through folders only, so they get one: links that lie as the installed
# package does.
tree:
	@rm -rf build/tree && mkdir -p build/tree/sbeval
	@for path in sbeval/*; do case $$path in */__pycache__) ;; *) ln -s "../../../$$path" build/tree/sbeval/ ;; esac; done
	@for room in $(ROOMS); do ln -s "../../../$$room" build/tree/sbeval/; done

editor: tree
	@echo "build/tree/sbeval is the package as it installs, made of links into this checkout."
	@echo "Pyright and Pylance find it by pyproject.toml; elsewhere make build/tree a source root."

types: $(INSTALLED) tree
	$(BIN)/mypy --package sbeval

bench: $(INSTALLED)
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/corpora.py sbeval/demo/checkpoints/rope
	$(BIN)/python benchmarks/report.py
	$(BIN)/python benchmarks/harness.py
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/decode.py
	$(BIN)/python benchmarks/skipping.py

clean:
	rm -rf $(VENV) build dist report results .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
