"""The types of a job's settings in Python; `tools/job_options.py` writes this file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class JobOptions(TypedDict, total=False):
    """Settings of a job by their keys in a configuration file; all are optional."""

    cluster: str | None  # Profile or backend (default: the configuration's).
    nodes: int | str | None
    spares: int | None
    gpus: int | str | None
    gpus_per_node: int | str | None
    nproc_per_node: int | str | None
    cpus_per_task: int | None
    mem: int | str | None
    time: int | str | None
    name: str | None
    env: Mapping[str, str | int | float] | None
    secret: str | Sequence[str] | None
    workdir: str | os.PathLike[str] | None
    python: str | None
    uv: bool | None
    env_archive: str | os.PathLike[str] | None
    env_cache: str | None
    setup: str | Sequence[str] | None
    max_restarts: int | None
    retry: str | Sequence[str] | None
    start: str | None
    launcher: str | None
    require_gpus: bool | None
    template: str | os.PathLike[str] | None
    set: Mapping[str, Any] | None
    hosts: str | Sequence[str] | None
    hostfile: str | os.PathLike[str] | None
    login: str | None
    transport: str | None
    sync: bool | None
    snapshot: bool | None
    include_secrets: bool | None
    account: str | None
    partition: str | None
    qos: str | None
    nodelist: str | None
    exclude: str | None
    reservation: str | None
    container: str | None
    array: str | None
    after: str | Sequence[str] | None
    requeue: bool | None
    signal_before: int | str | None
    warn_signal: str | None
    until_done: bool | None
    checkpoint_dir: str | None
    notify: str | Sequence[str] | None
    notify_cmd: str | Sequence[str] | None
    notify_on: str | Sequence[str] | None
    preflight: str | None
    hang_timeout: int | str | None
    metrics: bool | None
    metrics_port: int | None
    join_timeout: float | None
    lease: float | None
    grace: float | None
