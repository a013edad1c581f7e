#!/bin/sh
# Installs the launchers of Open MPI and MPICH, and iproute2 for nodes in network namespaces, where they are missing: the tests use them.
# Use: tools/mpi.sh   (on Debian and its kin; elsewhere it says what to install, and the tests that need it are skipped)
set -eu

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

missing=
for pair in mpirun.openmpi:openmpi-bin mpirun.mpich:mpich ip:iproute2; do
  command -v "${pair%%:*}" > /dev/null || missing="$missing ${pair#*:}"
done
[ -n "$missing" ] || exit 0

# shellcheck disable=SC2086 # a list of words
if command -v apt-get > /dev/null && printf 'mpi: installing%s\n' "$missing" >&2 &&
  { as_root apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends $missing > /dev/null 2>&1 ||
    { as_root apt-get -o DPkg::Lock::Timeout=300 update -qq &&
      as_root apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends $missing > /dev/null; }; }; then
  exit 0
fi
printf 'mpi: the tests of these launchers are skipped until they are installed:%s\n' "$missing" >&2
