"""Connect to many hosts at once through clusterjob; run COMMAND on each if it is given.

Use: fan_out.py CONFIG HOSTS [COMMAND]
"""

import sys
from pathlib import Path

from clusterjob.core.hosts import Host, parse_hosts
from clusterjob.remote.connect import ConnectOptions
from clusterjob.remote.pool import Pool, for_each

config, names, *command = sys.argv[1:]
pool = Pool(ConnectOptions(timeout=60.0, warn=print, ssh_config=Path(config)))


def work(host: Host) -> int:
    connection = pool.connection(host)
    return connection.execute(command[0]).recv_exit_status() if command else 0


outcome = for_each(parse_hosts(names), work)
for error in outcome.errors.values():
    print(error.message, file=sys.stderr)
sys.exit(1 if outcome.errors or any(outcome.results.values()) else 0)
