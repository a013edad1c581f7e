#!/bin/sh
# Install missing packages of the tests: the launchers of Open MPI and MPICH, and iproute2 for
# nodes in network namespaces.
# Usage: tools/mpi.sh
# On systems without apt-get it prints the missing packages; the tests that need them are skipped.
set -eu

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

missing=
for pair in mpirun.openmpi:openmpi-bin mpirun.mpich:mpich ip:iproute2; do
  command -v "${pair%%:*}" > /dev/null || missing="$missing ${pair#*:}"
done
[ -n "$missing" ] || exit 0

# shellcheck disable=SC2086 # a list of package names
if command -v apt-get > /dev/null && printf 'mpi: installing%s\n' "$missing" >&2 &&
  { as_root apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends \
    $missing > /dev/null 2>&1 ||
    { as_root apt-get -o DPkg::Lock::Timeout=300 update -qq &&
      as_root apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends \
        $missing > /dev/null; }; }; then
  exit 0
fi
printf 'mpi: the tests of these launchers are skipped until they are installed:%s\n' "$missing" >&2
