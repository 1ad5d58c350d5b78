# Everything runs in the virtual environment .venv, which the first target that needs it makes.
#
#   PYTHON       the Python (3.11 or newer) that makes the environment
#   TORCH        the PyTorch that is installed; pip's own settings (PIP_INDEX_URL, ...) apply
#   PYTEST_ARGS  more arguments of pytest, for example PYTEST_ARGS='-k storage'
#   JOBS         processes that share the test files, of 2 GB of memory each; three keep two cores busy

PYTHON ?= python3
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
JOBS ?= 3

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
# The pager and extras are built against the PyTorch that is installed, not against another one.
# Most files that pip installs are never imported: bytecode is made, and kept, of those that are.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-build-isolation --no-compile
export PYTHONDONTWRITEBYTECODE :=
# Extras alone: the kernels are built by the first installation.
EXTRA := PYG_SAR_KERNELS=keep $(INSTALL)

# A file's tests stay together, in the order of tests/conftest.py: the longest files come first. A
# process that a hung test has ended is not replaced: its test would only hang again.
AT_ONCE := -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help venv demo test test-full test-gpu test-hosted test-random test-versions nightly coverage docs lint format clean distclean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMPS)/core ## Make the virtual environment and install the package with its core needs

demo: $(STAMPS)/plot ## Partition a synthetic graph, train on 4 workers, compare with one process
	$(BIN)/pyg-sar demo

test: $(STAMPS)/test ## Run ruff, mypy and the tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy & types=$$!; $(BIN)/pytest $(AT_ONCE) --durations=10 $(PYTEST_ARGS); \
		tests=$$?; wait $$types && exit $$tests

test-full: override PYTEST_ARGS += --all
test-full: $(STAMPS)/full test ## Install the extras sparse, ogb and triton (minutes, 1 GB), run all tests

test-gpu: $(STAMPS)/gpu ## Run the kernels' and the contract's tests on the GPUs of this machine
	@$(BIN)/python -c 'import torch; raise SystemExit(not torch.cuda.is_available())' || \
		{ echo "PyTorch sees no GPU here: nothing was run. Set TORCH to a PyTorch for CUDA"; exit 1; }
	TRITON_INTERPRET=0 $(BIN)/pytest tests/test_gpu_kernels.py tests/test_gpu_workers.py tests/test_gpu_flows.py tests/test_gpu_tools.py $(PYTEST_ARGS)

test-hosted: $(STAMPS)/test ## Run the tests with hosted parts in place of workers
	$(BIN)/pytest --hosted $(AT_ONCE) $(PYTEST_ARGS)

test-random: $(STAMPS)/test ## Try a thousand random layers, and two thousand random messages
	$(BIN)/pytest tests/test_random_models.py tests/test_random_messages.py --hypothesis-profile thousand -o faulthandler_timeout=7200 $(PYTEST_ARGS)

coverage: $(STAMPS)/test ## Try every class that PyG exports, and write docs/what-runs.md
	$(BIN)/pytest tests/test_coverage.py --coverage-out docs/what-runs.md $(PYTEST_ARGS)

test-versions: $(STAMPS)/core ## Try the oldest and the newest PyTorch and PyG with each Python at hand (gigabytes)
	$(BIN)/python benchmarks/tested_versions.py --out docs/versions.md

nightly: test-full test-hosted test-random test-versions ## Run all that takes too long for each change (hours)

docs: $(STAMPS)/docs ## Write guides and API reference to build/site; references that lead nowhere are errors
	$(BIN)/python -m sphinx -q -W --keep-going -c docs/api -b html . build/site
	cp build/site/README.html build/site/index.html
	$(BIN)/pytest -q tests/test_documents.py -k links

lint: $(STAMPS)/test ## Run ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(STAMPS)/test ## Let ruff correct the layout of the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## Remove caches and what builds leave behind
	rm -rf build dist docs/api/pyg_sar*.rst *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## Remove the virtual environment and the built kernels as well
	rm -rf $(VENV) pyg_sar/_*.so pyg_sar/_no_*.txt

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "pyg_sar needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(STAMPS)/core: pyproject.toml setup.py $(wildcard extensions/*.cpp extensions/*.h) | $(BIN)/python
	$(INSTALL) 'setuptools>=77' wheel
	$(INSTALL) '$(TORCH)'
	$(INSTALL) -e .
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/plot: $(STAMPS)/core
	$(EXTRA) -e '.[plot]'
	@touch $@

$(STAMPS)/test: $(STAMPS)/core
	$(EXTRA) -e '.[test]'
	@touch $@

$(STAMPS)/docs: $(STAMPS)/test
	$(EXTRA) -e '.[docs]'
	@touch $@

$(STAMPS)/full: $(STAMPS)/test
	$(EXTRA) -e '.[test,sparse,ogb,triton]'
	@touch $@

# Without torch-scatter: where there is no compiler for CUDA it is built for CPUs alone, and PyG would
# call it with tensors of a GPU.
$(STAMPS)/gpu: $(STAMPS)/test
	$(EXTRA) -e '.[test,triton]'
	@touch $@
