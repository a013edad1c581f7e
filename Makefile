# Main targets: demo, test, test-unit, test-slow, test-gpu, slurm, lint, bench, clean. Each installs
# what it needs in its first run. A new machine needs Python >= 3.10 and make; Python packages are
# installed into .venv, and Slurm for the tests from Debian's packages.

BIN := .venv/bin
DEMO := .venv/demo
READY := .venv/ready
# Four processes share the tests on two cores, because most tests wait half of the time.
FOUR := --numprocesses 4 --dist worksteal
# Some images set this variable. Without cached bytecode, each command of a test compiles the package.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-unit test-slow test-gpu slurm mpi sshd shells packers browser paddle lint bench clean

demo: $(DEMO)  ## Train a small CNN on two "nodes" of this machine with two workers each
	$(BIN)/clusterjob run --cluster local --nodes 2 --gpus-per-node 2 examples/train_digits.py

test: lint slurm mpi sshd shells packers browser  ## Run lint and all tests except the slow fault and scale tests
	$(BIN)/python -m pytest -m "not slow" $(FOUR)

test-unit: $(READY)  ## Run the unit tests: one minute, without root and daemons
	$(BIN)/python -m pytest tests/unit $(FOUR)

test-slow: $(READY) slurm mpi sshd shells packers browser paddle
	$(BIN)/python -m pytest -m slow $(FOUR)

test-gpu:  ## Run the tests that need an NVIDIA GPU, with the torch of PYTHON
	tools/gpu.sh
	.venv-gpu/bin/python -m pytest tests/gpu -v

slurm:  ## Install Debian packages for the tests' own Slurm, if missing
	tools/slurm.sh

mpi:  ## Install the launchers of Open MPI and MPICH, and ip, if missing
	tools/mpi.sh

sshd:  ## Install sshd, pam_oath and a KDC for the tests of the SSH backend, if missing
	tools/sshd.sh

shells:  ## Install zsh, fish and tmux for the tests of the completion and of screens, if missing
	tools/shells.sh

packers:  ## Install the programs that pack and unpack environments, and strace, if missing
	tools/packers.sh

browser:  ## Install Chromium for the tests of the report, if missing
	tools/browser.sh

paddle: $(READY)  ## Install PaddlePaddle's CPU wheel into .venv-paddle, if missing
	tools/paddle.sh

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin --no-warn-unreachable --follow-imports silent -p clusterjob.cli -p clusterjob.core -p clusterjob.backends -p clusterjob.remote -p clusterjob.doctor -p clusterjob.api
	$(BIN)/lint-imports
	$(BIN)/python tools/check_words.py

bench: $(READY) slurm  ## Measure the speed against torchrun on this machine
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python benchmarks/start.py
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python benchmarks/slurm.py
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python benchmarks/place.py

$(DEMO): pyproject.toml constraints.txt tools/setup.sh
	tools/setup.sh demo

$(READY): pyproject.toml constraints.txt tools/setup.sh
	tools/setup.sh dev

clean:
	rm -rf .venv .venv-paddle .venv-gpu build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	  .import_linter_cache
