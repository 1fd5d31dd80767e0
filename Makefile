# Development on a machine without a GPU. `make setup` builds .venv; everything else runs in it.
#
# On machines where the package index serves a CUDA build of torch (large, but it works), choose a CPU build:
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
# Processes that run tests beside each other, the longest files first (tests/schedule.py); each takes up to 4 GB. One more than
# two cores: while an engine starts or answers, its test waits.
JOBS ?= 3

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install --constraint constraints.txt
STAMP := $(VENV)/.hypic-setup
export OMP_NUM_THREADS ?= 1

.PHONY: setup test lint format demo eval freeze clean

setup: $(STAMP)

# SGLang and the four packages beside it would pull CUDA libraries: they come without their dependencies, and last.
# SGLang pins an old OpenAI client; tests/server also drives the newest one, which lies in a folder of its own.
$(STAMP): pyproject.toml constraints.txt Makefile
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH_INDEX:%=--extra-index-url %) torch
	$(PIP) --editable '.[cpu,dev,eval,plot]'
	$(PIP) $(TORCH_INDEX:%=--extra-index-url %) --no-deps torchvision sglang xgrammar compressed-tensors triton
	$(PY) -c 'from hypic.platform_cpu.torchvision_shim import main; main()'
	$(PY) -m pip --disable-pip-version-check install --no-warn-conflicts --upgrade --target $(VENV)/openai openai
	@$(PY) -c 'import torch; torch.version.cuda and print("note: this torch is a CUDA build; for a smaller one: make clean setup TORCH_INDEX=https://download.pytorch.org/whl/cpu")'
	touch $@

test: setup
	$(PY) -m pytest -n $(JOBS) --dist loadfile

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: setup
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

demo: setup
	$(PY) -m hypic.demo

# A sample of the method table on the trained model; fails if a gate of models/almanac is missed.
eval: setup
	rm -rf build/eval
	$(PY) -m hypic eval models/almanac --data almanac --n 160 --seeds 0 --gates almanac --out build/eval

freeze:
	@{ sed '/^[^#]/,$$d' constraints.txt; $(PY) -m pip freeze --exclude-editable | sed 's/+cpu$$//'; } > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info models/tiny .mypy_cache .pytest_cache .ruff_cache .hypothesis
