#!/bin/sh
# Install the missing Debian packages of the tests; start no daemon, now or at the next boot.
# Usage: tools/packages.sh
# Without root, sudo or apt-get, it prints in one line what is missing: tests that need it are skipped.
set -eu
PATH=$PATH:/usr/sbin:/sbin

# A program or file, and the package that contains it.
missing=$(while read -r program package; do
  case $program in
    /*) for file in $program; do [ -e "$file" ] && break; done ;; # a pattern
    *) command -v "$program" > /dev/null ;;
  esac || printf '%s\n' "$package"
done << 'TABLE' | sort -u | tr '\n' ' '
slurmctld slurm-wlm
slurmd slurm-wlm
sbatch slurm-wlm
slurmdbd slurmdbd
munged munge
mariadbd mariadb-server-core
mariadb-install-db mariadb-server-core
my_print_defaults mariadb-client-core
mpirun.openmpi openmpi-bin
mpirun.mpich mpich
ip iproute2
sshd openssh-server
ssh-keygen openssh-client
openssl openssl
oathtool oathtool
/lib/*/security/pam_oath.so libpam-oath
krb5kdc krb5-kdc
kadmin.local krb5-admin-server
kinit krb5-user
zsh zsh
fish fish
tmux tmux
mksquashfs squashfs-tools
squashfuse squashfuse
zstd zstd
unzip unzip
strace strace
chromium chromium
TABLE
)
[ -n "$missing" ] || exit 0

say() { printf 'packages: %s\n' "$1" >&2; }

if [ "$(id -u)" = 0 ]; then
  root=
elif command -v sudo > /dev/null && sudo -n true 2> /dev/null; then
  root=sudo
else
  root=none
fi
if [ "$root" = none ] || ! command -v apt-get > /dev/null; then
  say "tests that need these packages are skipped (only root can install them): $missing"
  exit 0
fi

# dpkg calls policy-rc.d before it starts a daemon; exit code 101 forbids it (Debian Policy, 9.3.3).
policy=/usr/sbin/policy-rc.d
restore() {
  $root rm -f "$policy"
  if [ -e "$policy.clusterjob" ]; then $root mv "$policy.clusterjob" "$policy"; fi
}
trap restore EXIT
trap 'exit 1' HUP INT TERM
if [ -e "$policy" ]; then $root mv "$policy" "$policy.clusterjob"; fi
printf '#!/bin/sh\nexit 101\n' | $root tee "$policy" > /dev/null
$root chmod 755 "$policy"

# Only units that this installation adds are disabled; the user may need those that exist already.
new=
for unit in munge slurmctld slurmd slurmdbd ssh krb5-kdc krb5-admin-server; do
  [ -e "/lib/systemd/system/$unit.service" ] || new="$new $unit"
done
say "installing $missing"
$root apt-get -o DPkg::Lock::Timeout=300 update -qq
# shellcheck disable=SC2086 # a list of package names
$root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 \
  install -y -qq --no-install-recommends $missing > /dev/null
if command -v systemctl > /dev/null; then
  for unit in $new; do $root systemctl --quiet disable "$unit" 2> /dev/null || true; done
fi
