"""Entry point of the node zip: refuse an old Python, else launch the agent."""

# This file becomes the zip's __main__.py, so any Python, even 2.7, must be able to parse it.
import gc
import os
import sys


def _refuse(message):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    sys.stderr.write("clusterjob: %s\n" % message)  # noqa: UP031
    path = os.path.join(os.environ.get("CLUSTERJOB_JOB_DIR", ""), "ends")
    if os.path.isdir(path):
        name = "node%s.refused" % os.environ.get("CLUSTERJOB_NODE_RANK", "0")  # noqa: UP031
        with open(os.path.join(path, name), "w") as stream:
            stream.write("1\n%s: %s\n" % (os.uname()[1], message))  # noqa: UP031
    sys.exit(1)


if __name__ == "__main__":
    if sys.version_info < (3, 10):  # noqa: UP036
        _refuse(
            "%s is Python %d.%d: 3.10 or newer is needed"  # noqa: UP031
            % ((sys.executable,) + sys.version_info[:2])  # noqa: RUF005
        )
    gc.disable()  # until all modules are imported: there is nothing to collect
    from clusterjob.node.launch import main

    sys.exit(main())
