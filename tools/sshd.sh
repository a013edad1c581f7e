#!/bin/sh
# Install sshd, ip, pam_oath and MIT's KDC for the tests of the SSH backend, if missing; start no
# server.
# Usage: tools/sshd.sh
set -eu

say() { printf 'sshd: %s\n' "$1" >&2; }

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

PATH=$PATH:/usr/sbin:/sbin
if command -v sshd > /dev/null && command -v ip > /dev/null &&
  command -v ssh-keygen > /dev/null && command -v oathtool > /dev/null &&
  command -v openssl > /dev/null && command -v krb5kdc > /dev/null &&
  command -v kadmin.local > /dev/null && command -v kinit > /dev/null &&
  ls /lib/*/security/pam_oath.so > /dev/null 2>&1; then
  exit 0
fi
if ! command -v apt-get > /dev/null; then
  say "install openssh-server, iproute2, pam_oath, oathtool, and MIT's KDC and clients:"
  say "the tests of the SSH backend start servers of their own"
  exit 1
fi
say "installing openssh-server, iproute2, libpam-oath and krb5-kdc; no server is started"
as_root apt-get update -qq
# policy-rc.d prevents the package from starting a server on this machine.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" > /dev/null
  as_root chmod 755 "$policy"
  trap 'as_root rm -f "$policy"' EXIT
fi
DEBIAN_FRONTEND=noninteractive as_root apt-get -o DPkg::Lock::Timeout=300 \
  install -y -qq openssh-server iproute2 openssl libpam-oath oathtool krb5-kdc krb5-admin-server \
  krb5-user > /dev/null
