"""Check that an agent's message concerns the agent's own node.

The token proves that an agent belongs to the job. It does not prove that the agent's host can be
trusted.
"""

from __future__ import annotations

from clusterjob.node.rendezvous.stack_messages import StackFound
from clusterjob.node.states import NodeState
from clusterjob.node.system.codec import MalformedMessageError
from clusterjob.node.verdict import Failure

_MAX_EXIT_CODE = 255


def check_sender(message: object, node_rank: int) -> None:
    """Check that an agent reports failures and stacks of its own node only.

    Args:
        message: a decoded message of an agent.
        node_rank: the agent's node.

    Raises:
        MalformedMessageError: a failure or a stack belongs to another node, or its worker or exit
            code is impossible.
    """
    failures: list[Failure] = []
    if isinstance(message, StackFound) and message.stack.node_rank != node_rank:
        raise MalformedMessageError(f"a stack of node {message.stack.node_rank}")
    if isinstance(message, NodeState):
        failures = [each.failure for each in (*message.failing, *message.exits)]
        if any(each.failure.rank is None for each in message.exits):
            raise MalformedMessageError("an early exit without a rank")
        failures += message.probed.failures if message.probed is not None else ()
    for failure in failures:
        if failure.node_rank != node_rank:
            raise MalformedMessageError(f"a failure of node {failure.node_rank}")
        if (failure.rank is None) != (failure.local_rank is None):
            raise MalformedMessageError("a failure with only one of rank and local rank")
        if min(failure.rank or 0, failure.local_rank or 0) < 0:
            raise MalformedMessageError(f"a failure of rank {failure.rank}")
        if not 0 <= failure.exit_code <= _MAX_EXIT_CODE:
            raise MalformedMessageError(f"a failure with exit code {failure.exit_code}")
