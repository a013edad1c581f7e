"""The commands inside a running job: `exec`, `shell` and `forward`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from clusterjob.cli.help import Command
from clusterjob.cli.job_options import Id
from clusterjob.errors import UsageError

_COMMAND = "clusterjob.command"  # key of the command line in a command's context

Rank = Annotated[
    int | None,
    typer.Option(
        "--rank",
        min=0,
        metavar="R",
        help="Rank of the worker whose environment is used (default: the node's first).",
    ),
]
Node = Annotated[
    int | None,
    typer.Option("--node", min=0, metavar="N", help="Node (default: that of --rank, or 0)."),
]


class CommandAfterId(Command):
    """A command whose line ends in a command line: ID -- COMMAND, or ID COMMAND."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split the command line off before the options are parsed."""
        takes_value = {
            word for param in self.params if not getattr(param, "is_flag", False)
            for word in param.opts
        }  # fmt: skip
        named = False
        index = 0
        while index < len(args):
            word = args[index]
            if word == "--":
                ctx.meta[_COMMAND] = args[index + 1 :]
                return super().parse_args(ctx, args[:index])
            if not word.startswith("-"):
                if named:
                    ctx.meta[_COMMAND] = args[index:]
                    return super().parse_args(ctx, args[:index])
                named = True
            index += 2 if word in takes_value else 1
        ctx.meta[_COMMAND] = []
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return the usage line."""
        return ["[OPTIONS]", "ID", "-- COMMAND [ARGS]..."]


def execute(
    ctx: typer.Context,
    job_id: Id,
    node: Node = None,
    rank: Rank = None,
    everywhere: Annotated[  # noqa: FBT002
        bool,
        typer.Option("--all", help="Run on every node, with labelled output (default: one node)."),
    ] = False,
    no_tty: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--no-tty", "-T", help="No terminal for the command (default: one if this has one)."
        ),
    ] = False,
) -> int:
    """Run a command inside a running job, in a worker's environment and allocation.

    The exit code is the command's: 128 + N after signal N, 126 or 127 if it cannot be started. It
    is 255 if the job does not run or the connection breaks. With --all, it is the first node's
    code that is not 0, and stdin is empty. The command ends with the job.
    """
    from clusterjob.cli import output
    from clusterjob.core import inside
    from clusterjob.core.records import Records

    argv = ctx.meta[_COMMAND]
    if not argv:
        raise UsageError("there is no command", f"clusterjob exec {job_id} -- COMMAND")
    record = Records().find(job_id)
    if not everywhere:
        return inside.run(record, argv, node=node, rank=rank, terminal=not no_tty)
    if node is not None or rank is not None:
        raise UsageError("--all is every node", "remove --node and --rank, or --all")
    lines = output.NodeLines()
    return inside.run_on_all(record, argv, show=lines.show, warn=output.print_message)


def shell(job_id: Id, rank: Rank = None, node: Node = None) -> int:
    """Open an interactive shell inside a running job, in a worker's environment.

    The exit code is the shell's, or 255 as for `exec`.
    """
    from clusterjob.core import inside
    from clusterjob.core.records import Records

    return inside.run(Records().find(job_id), (), node=node, rank=rank, terminal=True)


def forward(
    job_id: Id,
    ports: Annotated[
        list[str],
        typer.Argument(
            metavar="[LOCAL:]PORT...",
            help="Ports of the node, and of this machine (default: the same, or a free one above).",
        ),
    ],
    node: Node = None,
) -> int:
    """Forward ports of a job's node to this machine, for TensorBoard, Jupyter or debugpy.

    Servers that listen on the node's loopback are reached too. This machine listens on 127.0.0.1
    alone. The command runs until Ctrl-C or the end of the job.
    """
    from clusterjob.cli import output
    from clusterjob.core.forward import Port, run
    from clusterjob.core.records import Records
    from clusterjob.node.system.sanitize import sanitize

    wanted = [Port.parse(text) for text in ports]
    return run(
        Records().find(job_id),
        wanted,
        node=node,
        show=lambda line: print(sanitize(line), flush=True),
        warn=output.print_message,
    )
