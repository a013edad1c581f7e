#!/bin/sh
# Prepare .venv-gpu for the tests on GPUs, and print the GPUs, torch and NCCL that they will use.
# Usage: tools/gpu.sh
# PYTHON names an interpreter with a CUDA build of torch (default: .venv/bin/python or python3).
# .venv-gpu uses its packages. If it has no torch, torch is installed from the package index.
set -eu
cd -- "$(dirname -- "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=python3

say() { printf 'gpu: %s\n' "$1" >&2; }

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
  say "$python is missing or older than Python 3.10; PYTHON=/path/to/python names another"
  exit 1
fi
"$python" -m venv --clear .venv-gpu
# A virtual environment of an environment sees only the packages of the interpreter below both.
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
own=$(.venv-gpu/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\n' "$packages" > "$own/packages-of-python.pth"
say "preparing .venv-gpu with the packages of $python"
grep -v '^torch==' constraints.txt > .venv-gpu/constraints.txt
.venv-gpu/bin/python -m pip install --quiet --disable-pip-version-check \
  --constraint .venv-gpu/constraints.txt --editable '.[torch]' numpy pytest hypothesis
nvidia-smi -L 1>&2 2> /dev/null || say "nvidia-smi finds no GPU: the tests will be skipped"
.venv-gpu/bin/python -c '
import torch
gpus = torch.cuda.device_count()
nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else "unused"
print(f"gpu: torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}, {gpus} GPUs")
' >&2
