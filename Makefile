# What a fresh machine needs: make, Python >= 3.11 and a package index that pip can reach.
#   make quickstart   train a tiny mixture of experts on the CPU, and see what it learnt
#   make test         lint, types, generated pages, then every test
# The environment is built in .venv on first use, and again when pyproject.toml changes.

PYTHON ?= python3
# The tested version. It is installed first, and the rest may not move it: another torch is a download of gigabytes.
TORCH ?= 2.13.0
WORKERS ?= 2

BIN := .venv/bin
READY := .venv/.ready
# One thread per process: on few cores more are slower, and the last bits of a sum depend on their number.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help quickstart test lint types docs docs-check clean

help:
	@sed -n 's/^#   //p' Makefile

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Halo needs Python 3.11 or newer, and '$(PYTHON)' is not (or is missing): make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	@echo 'torch==$(TORCH)' > .venv/constraints.txt
	$(BIN)/python -m pip install --quiet 'torch==$(TORCH)'
	$(BIN)/python -m pip install --quiet --constraint .venv/constraints.txt --editable '.[dev,plot,tensorboard]'
	@touch $@

quickstart: $(READY)
	HF_HUB_OFFLINE=1 $(BIN)/python examples/quickstart/run.py

# The tests come last, so that their closing line is the last thing printed. They also compare the generated pages.
test: lint types
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --numprocesses $(WORKERS)

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

# Writes the pages and the pasted outputs that are made from the code.
docs: $(READY)
	$(BIN)/python docs/generate.py

# Names those that are out of date, as the tests do.
docs-check: $(READY)
	$(BIN)/python docs/generate.py --check

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
