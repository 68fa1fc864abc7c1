# Two commands do everything on a fresh machine with Python >= 3.11, pip and make: `make train` and `make test`.
# Both first create .venv (or reuse it) and use the machine's GPUs when there are any.

PYTHON ?= python3
ARGS ?=
WORKERS ?= logical

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
TORCH := $(if $(filter-out 0,$(GPU)),torch==2.11.0,torch==2.13.0)
TRITON := triton==3.6.0
IMPORTS := comet.kernels, comet.launch, comet.configs, torch, triton, numpy, hydra, filelock, matplotlib, psutil, tqdm, pytest
FOLDERS := import importlib.util, sys; found = importlib.util.find_spec("torch") is not None; \
  print(*[path for path in sys.path if found and path.endswith("-packages")], sep="\n")
PIP = $(PYTHON) -m pip --disable-pip-version-check --python $(BIN)/python
# As many processes as cores, which share the GPUs where there are any; one without pytest-xdist.
SPREAD = $(shell $(BIN)/python -c 'import xdist' 2>/dev/null && printf '%s' '-n $(WORKERS) --maxprocesses 12 --dist worksteal')
PYTEST = $(BIN)/python -P -m pytest $(SPREAD)
# Linting sees one package tree, as installed: the folders kernels/, launch/ and configs/ under comet.
TREE := build/tree/comet

.DEFAULT_GOAL := help
.PHONY: help setup train test test-slow test-all vllm torchtitan megatron trl docs lint ruff mypy compile count clean

help: ## show this list
	@grep -hE '^[a-z%-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY) ## create or reuse .venv and install what is missing

train: $(READY) ## run the main job: train a small MoE model (settings: make train ARGS="train.steps=200")
	$(BIN)/comet train $(ARGS)

test: $(READY) ## every kernel family and user path (WORKERS=N processes; GPU tests need GPUs)
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: $(READY) ## what make test leaves out: exhaustive cases, and runs of the command line that take long
	$(PYTEST) -m slow $(ARGS)

test-all: $(READY) ## all tests this machine can run
	$(PYTEST) $(ARGS)

vllm: build/vllm/ready ## install vLLM into build/vllm, for the tests of its adapters (0.8 GB; needs no GPU)

torchtitan: build/torchtitan/ready ## install torchtitan into build/torchtitan, for tests (0.25 GB; needs no GPU)

megatron: build/megatron/ready ## install Megatron-core 0.19 into build/megatron, for tests beside 0.16 (10 MB; needs no GPU)

trl: build/trl/ready ## install TRL into build/trl, for the test of its trainer (10 MB; needs no GPU)

docs: $(READY) ## build the pages into build/docs/html; open index.html there
	$(BIN)/python -c 'import sphinx, myst_parser, furo' 2>/dev/null || $(PIP) install --quiet -c constraints.txt -e '.[docs]'
	$(BIN)/python -P -m sphinx -E -q -W --keep-going -c docs -d build/docs/cache -b html . build/docs/html

lint: ruff mypy ## ruff and mypy; .pre-commit-config.yaml runs the same before a commit

ruff: $(READY)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

mypy: $(READY)
	rm -rf $(TREE) && mkdir -p $(TREE)
	ln -s $(CURDIR)/comet/* $(CURDIR)/kernels $(CURDIR)/launch $(CURDIR)/configs $(TREE)/
	MYPYPATH=build/tree $(BIN)/python -P -m mypy -p comet
	MYPYPATH=build/tree:benchmarks $(BIN)/python -P -m mypy -m bench -p baselines -p lib -p suites

compile: $(READY) ## compile every kernel ahead of time (no GPU needed)
	$(BIN)/comet compile $(ARGS)

triton-%: $(READY) ## compile with another version of Triton: make triton-3.9.0
	$(PIP) install --quiet --no-deps --target build/triton-$* triton==$*
	PYTHONPATH=build/triton-$* $(BIN)/python -P -m comet.kernels.aot.compile $(ARGS)

count: ## lines of product code and of tests by folder, beside those of a commit: make count ARGS=main
	@$(PYTHON) tests/count.py $(ARGS)

clean: ## remove .venv, builds and caches; results in outputs/ stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Apart from .venv and without their dependencies: vLLM pins a torch of its own, torchtitan older packages than
# transformers, and the tests need few of them. Megatron-core 0.19 asks for Python 3.12, and its files run on 3.11 as well.
build/%/ready: tests/%.txt $(READY)
	rm -rf build/$*
	$(PIP) install --quiet --no-deps --no-compile $(FOR) --target build/$* -r tests/$*.txt
	touch $@

build/megatron/ready: FOR := --python-version 3.12 --only-binary=:all: --ignore-requires-python

# torch already on the machine is used as it is: .venv then looks where $(PYTHON) does, after its own folders (which works
# for a $(PYTHON) inside a virtual environment too). Without a network the installation counts if everything imports.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Comet needs Python 3.11 or newer: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || $(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -c '$(FOLDERS)' > "$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')/machine.pth"
	$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) install '$(TORCH)'
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) install '$(TRITON)'
	$(PIP) install --quiet -c constraints.txt -e '.[dev]' || \
	  { $(PIP) install --no-index --no-build-isolation --no-deps -e . && $(BIN)/python -P -c 'import $(IMPORTS)'; }
	touch $@
