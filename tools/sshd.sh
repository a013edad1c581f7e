#!/bin/sh
# Install sshd and ip for the tests of the SSH backend, if missing; start no server.
# Usage: tools/sshd.sh
set -eu

say() { printf 'sshd: %s\n' "$1" >&2; }

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

PATH=$PATH:/usr/sbin:/sbin
if command -v sshd > /dev/null && command -v ip > /dev/null &&
  command -v ssh-keygen > /dev/null; then
  exit 0
fi
if ! command -v apt-get > /dev/null; then
  say "install openssh-server and iproute2: the tests of the SSH backend start servers of their own"
  exit 1
fi
say "installing openssh-server and iproute2; no server is started"
as_root apt-get update -qq
# policy-rc.d prevents the package from starting a server on this machine.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" > /dev/null
  as_root chmod 755 "$policy"
  trap 'as_root rm -f "$policy"' EXIT
fi
DEBIAN_FRONTEND=noninteractive as_root apt-get -o DPkg::Lock::Timeout=300 \
  install -y -qq openssh-server iproute2 > /dev/null
