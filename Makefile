# Few verbs: demo, test, test-unit, test-slow, slurm, lint, bench, clean. Each sets up what it needs; run again, each is quick.
# A fresh machine needs Python >= 3.10 and make; the rest is installed into .venv, and Slurm for the tests from Debian's packages.

BIN := .venv/bin
READY := .venv/ready
# Two processes take the tests from both ends: most of them wait for others most of the time.
TWO := --numprocesses 2 --dist worksteal

.PHONY: demo test test-unit test-slow slurm mpi sshd paddle lint bench clean

demo: $(READY)  ## train a small CNN on two "nodes" of this machine, two workers each
	$(BIN)/clusterjob run --cluster local --nodes 2 --gpus-per-node 2 examples/train_digits.py

test: lint slurm mpi sshd  ## everything but the slow fault and scale runs
	$(BIN)/python -m pytest -m "not slow" $(TWO)

test-unit: $(READY)  ## a minute, without root and daemons
	$(BIN)/python -m pytest tests/unit $(TWO)

test-slow: $(READY) slurm mpi sshd paddle
	$(BIN)/python -m pytest -m slow $(TWO)

slurm:  ## Debian packages for the tests' own Slurm; a moment when they are there
	tools/slurm.sh

mpi:  ## the launchers of Open MPI and MPICH, and ip for network namespaces
	tools/mpi.sh

sshd:  ## an sshd for the tests of the SSH backend; a moment when it is there
	tools/sshd.sh

paddle: $(READY)  ## PaddlePaddle's CPU wheel in .venv-paddle; a moment when it is there
	tools/paddle.sh

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY) slurm  ## speed against torchrun, in one run on this machine
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python benchmarks/start.py
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python benchmarks/slurm.py
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python benchmarks/place.py

$(READY): pyproject.toml constraints.txt tools/setup.sh
	tools/setup.sh

clean:
	rm -rf .venv .venv-paddle build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
