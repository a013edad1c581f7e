#!/bin/sh
# Install missing Debian packages of the tests' own Slurm: slurm-wlm, munge, slurmdbd and MariaDB.
# No daemon of these packages is started, now or at the next boot: the tests start their own
# (tests/support/slurm_cluster.py).
# Usage: tools/slurm.sh
set -eu
PATH=$PATH:/usr/sbin:/sbin
policy=/usr/sbin/policy-rc.d
units='munge slurmctld slurmd slurmdbd'

say() { printf 'slurm: %s\n' "$*" >&2; }

has() {
  for program; do command -v "$program" > /dev/null || return 1; done
}

if has slurmctld slurmd sbatch munged slurmdbd mariadbd mariadb-install-db my_print_defaults; then
  exit 0
fi
if ! has apt-get; then
  say "the tests need slurmctld, slurmd, slurmdbd, munged and mariadbd," \
    "and there is no apt-get to install them"
  exit 1
fi
if [ "$(id -u)" = 0 ]; then
  root=
elif has sudo && sudo -n true 2> /dev/null; then
  root='sudo'
else
  say "the tests need Slurm; as root:" \
    "apt-get install slurm-wlm munge slurmdbd mariadb-server-core mariadb-client-core"
  exit 1
fi

# dpkg calls policy-rc.d before it starts a daemon; exit code 101 forbids it (Debian Policy, 9.3.3).
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
for unit in $units; do
  if ! [ -e "/lib/systemd/system/$unit.service" ]; then new="$new $unit"; fi
done
say "installing Slurm and MariaDB for the tests"
$root apt-get -o DPkg::Lock::Timeout=300 update -qq
$root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 \
  install -y -qq --no-install-recommends \
  slurm-wlm munge slurmdbd mariadb-server-core mariadb-client-core > /dev/null
for unit in $new; do
  if has systemctl; then $root systemctl --quiet disable "$unit" 2> /dev/null || true; fi
done
