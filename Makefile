# `make` prints the targets. Each target installs what it needs in its first run. A new machine needs
# Python >= 3.10 and make; Python packages are installed into .venv, and the tests' Debian packages
# (Slurm, sshd and others) only as root or with sudo.

BIN := .venv/bin
DEMO := .venv/demo
READY := .venv/ready
# Four processes share the tests on two cores, because most tests wait half of the time.
FOUR := --numprocesses 4 --dist worksteal
# The same random examples in each run. The slow tests, and a plain pytest, draw new ones.
SAME := --hypothesis-seed 0
# Some images set this variable. Without cached bytecode, each command of a test compiles the package.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-unit test-slow test-gpu packages paddle lint bench picture clean

help:  ## Print these targets
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' Makefile | expand -t 12

demo: $(DEMO)  ## Train a small CNN on two "nodes" of this machine with two workers each
	$(BIN)/clusterjob run --cluster local --nodes 2 --gpus-per-node 2 examples/train_digits.py

test: lint packages  ## Run lint and all tests except the slow fault and scale tests
	$(BIN)/python -m pytest -m "not slow" $(SAME) $(FOUR) --dist loadgroup

test-unit: $(READY)  ## Run the unit tests: one minute, without root and daemons
	$(BIN)/python -m pytest tests/unit $(SAME) $(FOUR)

test-slow: $(READY) packages paddle  ## Run the slow fault and scale tests
	$(BIN)/python -m pytest -m slow $(FOUR)

test-gpu:  ## Run the tests that need an NVIDIA GPU, with the torch of PYTHON
	tools/gpu.sh
	.venv-gpu/bin/python -m pytest tests/gpu -v

packages:  ## Install the Debian packages of the tests, if missing; start no daemon
	tools/packages.sh

paddle: $(READY)  ## Install PaddlePaddle's CPU wheel into .venv-paddle, if missing
	tools/paddle.sh

lint: $(READY)  ## Run ruff, mypy, the import contracts and the check of words
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin --no-warn-unreachable --follow-imports silent -p clusterjob.cli -p clusterjob.core -p clusterjob.backends -p clusterjob.remote -p clusterjob.doctor -p clusterjob.api
	$(BIN)/lint-imports
	$(BIN)/python tools/check_words.py

bench: $(READY) packages  ## Measure the speed against torchrun on this machine
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python benchmarks/start.py
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python benchmarks/slurm.py
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python benchmarks/place.py

picture: $(READY)  ## Draw the picture of the README anew, from a real run
	$(BIN)/python tools/picture.py

$(DEMO): pyproject.toml constraints.txt tools/setup.sh
	tools/setup.sh demo

$(READY): pyproject.toml constraints.txt tools/setup.sh
	tools/setup.sh dev

clean:  ## Remove .venv, other environments and caches
	rm -rf .venv .venv-paddle .venv-gpu build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	  .import_linter_cache
