"""Compare a program in a worker with the same program under ``python script.py``.

Neither the program nor its output may show a difference.
"""

from __future__ import annotations

import json
import os
import py_compile
import re
import subprocess
import sys
import textwrap
import zipapp
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import Run, new_folder, run, write_tree
from procs import PLAIN, TEST_TIMEOUT, WITH_TORCH, Job, MakeJob

from clusterjob.core.spec import program_arguments
from clusterjob.node.program import Program

STARTS = ["fork", "exec"]


def as_worker(
    job: Job,
    start: str,
    *program: str,
    python: tuple[str, ...] = PLAIN,
    env: dict[str, str] | None = None,
) -> Run:
    """Run a program as the only worker of a node."""
    agent = job.start(0, "--start", start, "--no-echo", *program, python=python, env=env)
    code = agent.wait(TEST_TIMEOUT)
    return Run(code, job.log(0, "rank0.out"), job.log(0, "rank0.err"))


def as_python(
    job: Job,
    start: str,
    *program: str,
    python: tuple[str, ...] = PLAIN,
    env: dict[str, str] | None = None,
) -> Run:
    """Run the same program directly; for ``exec``, without the interpreter's options."""
    command = [*(python if start == "fork" else python[:1]), *program]
    ended = subprocess.run(
        command,
        check=False,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        cwd=job.directory,
        timeout=TEST_TIMEOUT,
        env=os.environ | (env or {}),
    )
    code = ended.returncode if ended.returncode >= 0 else 128 - ended.returncode
    return Run(code, ended.stdout.decode(errors="replace"), ended.stderr.decode(errors="replace"))


# -- Program ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "argv", "launch_arguments"),
    [
        (Program("script", "a b.py", ("-x",)), ["/py", "a b.py", "-x"], ["a b.py", "-x"]),
        (Program("script", "-a.py"), ["/py", "-a.py"], ["./-a.py"]),
        (Program("module", "a.b", ("-x",)), ["/py", "-m", "a.b", "-x"], ["-m", "a.b", "-x"]),
        (Program("command", "-a", ("--",)), ["-a", "--"], ["--", "-a", "--"]),
    ],
)
def test_program_gives_its_argv_and_launch_arguments(
    program: Program, argv: list[str], launch_arguments: list[str]
) -> None:
    assert (program.argv("/py"), program_arguments(program)) == (argv, launch_arguments)
    assert program.is_python == (argv[0] == "/py")


@given(st.sampled_from(["script", "module", "command"]), st.text(min_size=1), st.lists(st.text()))
def test_program_arguments_are_passed_unchanged(kind: str, target: str, args: list[str]) -> None:
    program = Program(kind, target, args=tuple(args))
    assert program.argv("/py")[len(program.argv("/py")) - len(args) :] == args
    assert program_arguments(program)[len(program_arguments(program)) - len(args) :] == args


# -- state that a program sees ---------------------------------------------------------------------

DUMP = """
import gc, json, locale, multiprocessing, os, pickle, signal, sys, threading
import helper
class Thing:
    def __init__(self):
        self.value = 42
main = sys.modules["__main__"]
spec = __spec__ and [
    __spec__.name, __spec__.origin, __spec__.parent, __spec__.submodule_search_locations,
    type(__spec__.loader).__name__,
]
copy = pickle.loads(pickle.dumps(Thing()))
streams = (sys.stdin, sys.stdout, sys.stderr)
handled = ("SIGINT", "SIGTERM", "SIGCHLD", "SIGHUP", "SIGUSR1", "SIGPIPE")
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path, "spec": spec,
    "package": __package__, "cached": __cached__,
    "keys": sorted(set(vars(main)) - {"annotated"}), "doc": __doc__,
    "loader": type(__loader__).__name__, "builtins": type(__builtins__).__name__,
    "annotations": sorted(__annotations__), "main is this": vars(main) is globals(),
    "cwd": os.getcwd(), "helper": helper.__file__,
    "pickled": [repr(type(copy)), type(copy) is Thing, copy.value],
    "gc": [gc.isenabled(), gc.get_threshold()],
    "threads": [thread.name for thread in threading.enumerate()],
    "main thread": threading.current_thread() is threading.main_thread(),
    "recursion": sys.getrecursionlimit(),
    "streams": [
        [stream.name, stream.mode, stream.encoding, stream.errors, stream.fileno()]
        for stream in streams
    ],
    "signals": {name: str(signal.getsignal(getattr(signal, name))) for name in handled},
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "wakeup": signal.set_wakeup_fd(-1),
    "locale": locale.setlocale(locale.LC_ALL), "umask": os.umask(0o22),
    "process": [multiprocessing.current_process().name, multiprocessing.parent_process()],
    "code": sys._getframe().f_code.co_filename, "executable": sys.executable,
    "warnings": sys.warnoptions, "dont write": sys.dont_write_bytecode,
}, sort_keys=True, indent=1))
"""


def write_package(job: Job) -> None:
    (job.directory / "helper.py").write_text("")
    (job.directory / "pkg").mkdir()
    write_tree(
        job.directory, **{"pkg/__init__.py": "from . import sibling\n", "pkg/sibling.py": ""}
    )
    for name in ("__main__", "mod"):
        (job.directory / "pkg" / f"{name}.py").write_text(
            "'''Some module.'''\nfrom . import sibling\nfrom .sibling import *" + DUMP
        )


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(
    "form", ["relative", "absolute", "dotted", "below", "symlink", "-m pkg", "-m pkg.mod", "-m mod"]
)
def test_program_in_worker_sees_same_state_as_under_python(
    make_job: MakeJob, form: str, start: str
) -> None:
    job = make_job()
    write_package(job)
    job.script("'''Some script.'''\nannotated: int = 1" + DUMP)
    (job.directory / "below").mkdir()
    write_tree(job.directory, **{"below/script.py": DUMP, "below/helper.py": "", "mod.py": DUMP})
    (job.directory / "elsewhere").mkdir()
    (job.directory / "elsewhere" / "link.py").symlink_to("../script.py")
    program = {
        "relative": ["script.py"], "absolute": [str(job.directory / "script.py")],
        "dotted": ["./below/../script.py"], "below": ["below/script.py"],
        "symlink": ["elsewhere/link.py"], "-m pkg": ["-m", "pkg"], "-m pkg.mod": ["-m", "pkg.mod"],
        "-m mod": ["-m", "mod"],
    }[form] + ["--flag", "a b", "-m", "--"]  # fmt: skip
    expected, actual = as_python(job, start, *program), as_worker(job, start, *program)
    assert (actual.code, actual.err) == (0, "")
    assert json.loads(actual.out) == json.loads(expected.out)


def test_program_in_preloaded_worker_sees_same_state_as_under_python(make_job: MakeJob) -> None:
    job = make_job()
    (job.directory / "helper.py").write_text("")
    job.script(DUMP)
    env = {"OMP_NUM_THREADS": "1"}
    expected = as_python(job, "fork", "script.py", "an argument", python=WITH_TORCH, env=env)
    actual = as_worker(job, "fork", "script.py", "an argument", python=WITH_TORCH, env=env)
    assert (actual.code, actual.err) == (0, "")
    assert json.loads(actual.out) == json.loads(expected.out)


@pytest.mark.parametrize("start", STARTS)
def test_interpreter_flags_apply_in_workers(make_job: MakeJob, start: str) -> None:
    job = make_job()
    job.script(
        "import sys; print(sys.path, sys.flags.safe_path, sys.flags.isolated, sys.warnoptions, "
        "sys.flags.optimize)"
    )
    env = {"PYTHONSAFEPATH": "1", "PYTHONWARNINGS": "ignore", "PYTHONOPTIMIZE": "1"}
    assert as_worker(job, start, "script.py", env=env) == as_python(
        job, start, "script.py", env=env
    )


# -- end of a program ------------------------------------------------------------------------------

# Each part is a separate script; the line with ## is its name.
SCRIPTS = r"""
## nothing
pass
## exit 3
import sys
sys.exit(3)
## exit text
import sys
sys.exit('some text')
## exit none
import sys
sys.exit(None)
## exit empty text
import sys
sys.exit('')
## exit 0
import sys
sys.exit(0)
## exit True
import sys
sys.exit(True)
## exit -1
import sys
sys.exit(-1)
## exit 256
import sys
sys.exit(256)
## exit 259
import sys
sys.exit(259)
## exit list
import sys
sys.exit([1, 2])
## exit in finally
import sys
try:
    raise ValueError('hidden')
finally:
    sys.exit(4)
## own SystemExit
class Mine(SystemExit): pass
raise Mine(6)
## _exit
import os
import py_compile
os._exit(5)
## raise
def f(x):
    raise ValueError('boom')

f(1)
## raise from
try:
    1 / 0
except ZeroDivisionError as error:
    raise KeyError('k') from error
## raise in raise
try:
    1 / 0
except ZeroDivisionError:
    raise KeyError('k')
## many lines
raise RuntimeError('one\ntwo\n')
## no message
raise RuntimeError
## assert
assert 1 == 2, 'no'
## own BaseException
class Mine(BaseException): pass
raise Mine('mine')
## str fails
class Mine(Exception):
    def __str__(self):
        raise ValueError('in str')
raise Mine
## keyboard interrupt
raise KeyboardInterrupt
## real interrupt
import os, signal, time
os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
## caught interrupt
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
except KeyboardInterrupt:
    raise SystemExit(8)
## recursion
import sys
sys.tracebacklimit = 2
def f(): f()
f()
## syntax error
print('never')
x = (
## indentation
if True:
x = 1
## syntax error in import
import broken
## missing import
import no_such_module_anywhere
## error in import
import failing
## eval error
eval('1 +')
## notes
error = ValueError('boom')
if hasattr(error, 'add_note'):
    error.add_note('a note')
raise error
## thread
import threading, time
def later():
    time.sleep(0.3)
    print('the thread ends')
threading.Thread(target=later).start()
print('main ends')
## thread after error
import threading, time
def later():
    time.sleep(0.3)
    print('the thread ends')
threading.Thread(target=later).start()
raise ValueError('boom')
## daemon thread
import threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print('main ends')
## error in thread
import threading
t = threading.Thread(target=lambda: 1 / 0, name='t')
t.start()
t.join()
## atexit
import atexit
atexit.register(print, 'goodbye')
print('main ends')
## atexit after exit
import atexit, sys
atexit.register(print, 'goodbye')
sys.exit(3)
## atexit after error
import atexit
atexit.register(print, 'goodbye')
raise ValueError('boom')
## error in atexit
import atexit
class Handler:
    __repr__ = lambda self: 'Handler()'
    def __call__(self): 1 / 0
atexit.register(Handler())
## excepthook
import sys
sys.excepthook = lambda kind, error, frames: print(
    'hook', kind.__name__, error, frames.tb_lineno, frames.tb_next
)
raise ValueError('boom')
## no newline
import sys
sys.stdout.write('no newline')
sys.stderr.write('nor here')
## stdout closed
import sys
print('before')
sys.stdout.close()
## unflushed
import sys
sys.stdout.reconfigure(line_buffering=False)
print('unflushed')
## future
from __future__ import annotations
x: nonsense = 1
print(__annotations__)
## no future
def f(x: 1 + 1): pass
print(f.__annotations__)
## del
class Last:
    def __del__(self):
        print('collected')
last = Last()
## warning
import warnings
warnings.warn('careful')
warnings.warn('old', DeprecationWarning)
## source
import inspect
def f():
    return 1
print(inspect.getsource(f))
## subprocess
import subprocess
print(subprocess.run(['sh', '-c', 'exit 7']).returncode)
## asyncio
import asyncio
async def main():
    child = await asyncio.create_subprocess_exec('sh', '-c', 'exit 7')
    print(await child.wait())
asyncio.run(main())
## os.fork
import os, sys
if os.fork() == 0:
    print('child')
    sys.exit(9)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
ENDINGS = dict(part.split("\n", 1) for part in SCRIPTS.split("\n## ")[1:])


# A worker started by exec is a plain interpreter; only its surroundings can differ.
IN_EXEC = (
    "exit 3",
    "exit text",
    "_exit",
    "raise",
    "keyboard interrupt",
    "syntax error",
    "thread",
    "atexit",
    "no newline",
)


@pytest.mark.parametrize(
    ("ending", "start"),
    [(ending, "fork") for ending in ENDINGS] + [(ending, "exec") for ending in IN_EXEC],
)
def test_program_in_worker_ends_as_under_python(make_job: MakeJob, ending: str, start: str) -> None:
    job = make_job()
    write_tree(
        job.directory,
        **{
            "script.py": ENDINGS[ending],
            "broken.py": "def f(:\n",
            "failing.py": "def f():\n    raise ValueError('in the import')\nf()\n",
        },
    )
    assert as_worker(job, start, "script.py") == as_python(job, start, "script.py")


@pytest.mark.parametrize("start", STARTS)
def test_script_with_coding_declaration_is_decoded(make_job: MakeJob, start: str) -> None:
    job = make_job()
    (job.directory / "script.py").write_bytes(b"# -*- coding: latin-1 -*-\nprint(ascii('\xe9'))\n")
    assert as_worker(job, start, "script.py") == Run(0, "'\\xe9'\n", "")


def test_undecodable_script_fails_with_syntax_error(make_job: MakeJob) -> None:
    job = make_job()
    (job.directory / "script.py").write_bytes(b"x = '\xff'")
    actual = as_worker(job, "fork", "script.py")
    assert actual.code == 1
    assert "SyntaxError" in actual.err
    assert "Traceback" not in actual.err
    assert "clusterjob/node" not in actual.err


@pytest.mark.parametrize("start", STARTS)
def test_files_that_program_leaves_open_are_written_completely(
    make_job: MakeJob, start: str
) -> None:
    """The forkserver's objects must not close descriptor numbers that the program reuses."""
    job = make_job()
    job.script("""
        files = [open(f"file{index}", "w") for index in range(40)]
        for file in files:
            file.write("content")
    """)
    assert as_worker(job, start, "script.py").code == 0
    assert [(job.directory / f"file{index}").read_text() for index in range(40)] == ["content"] * 40


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("ending", ["raise ValueError('boom')", "import sys; sys.exit(3)", "x = ("])
def test_module_in_worker_ends_as_under_python(make_job: MakeJob, ending: str, start: str) -> None:
    job = make_job()
    (job.directory / "mod.py").write_text(ending)
    expected, actual = as_python(job, start, "-m", "mod"), as_worker(job, start, "-m", "mod")
    assert (actual.code, actual.out) == (expected.code, expected.out)
    assert without_runpy(actual.err) == without_runpy(expected.err)


def without_runpy(text: str) -> str:
    """Return a traceback without its title and the frames of runpy."""
    return re.sub(r'Traceback .*\n|  File "<frozen [\w.]+>", line \d+, in \w+\n', "", text)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", ["no_such_module", "no_such.module", "pkg.no_such", "plain"])
def test_module_that_cannot_be_run_is_reported_without_traceback(
    make_job: MakeJob, name: str, start: str
) -> None:
    job = make_job()
    write_package(job)
    write_tree(job.directory, **{"plain/__init__.py": ""})
    expected, actual = as_python(job, start, "-m", name), as_worker(job, start, "-m", name)
    assert actual.code == expected.code == 1
    assert actual.out == ""
    assert "No module named" in actual.err
    assert "Traceback" not in actual.err
    assert name.split(".", maxsplit=1)[0] in actual.err


@pytest.mark.parametrize("start", STARTS)
def test_missing_script_fails_as_under_python(make_job: MakeJob, start: str) -> None:
    job = make_job()
    expected, actual = as_python(job, start, "nowhere.py"), as_worker(job, start, "nowhere.py")
    assert actual.code == expected.code == 2
    assert "can't open file" in actual.err
    assert "Traceback" not in actual.err


# -- processes that a program starts ---------------------------------------------------------------

CHILDREN = """
    import multiprocessing, os, sys
    class Thing:
        def __init__(self, value):
            self.value = value
    def double(thing):
        is_child = multiprocessing.current_process().name != "MainProcess"
        return Thing(thing.value * 2), __name__, is_child
    if __name__ == "__main__":
        context = multiprocessing.get_context(sys.argv[1])
        with context.Pool(2) as pool:
            for thing, name, is_child in pool.map(double, [Thing(1), Thing(2)]):
                print(type(thing) is Thing, thing.value, is_child)
        queue = context.SimpleQueue()
        child = context.Process(target=queue.put, args=("from the child",))
        child.start()
        print(queue.get())
        child.join()
        failing = context.Process(target=sys.exit, args=(3,))
        failing.start()
        failing.join()
        print(failing.exitcode)
        from multiprocessing import shared_memory
        block = shared_memory.SharedMemory(create=True, size=10)
        block.close()
        block.unlink()
        print("done")
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize(
    ("form", "start"), [("script", "fork"), ("module", "fork"), ("script", "exec")]
)
def test_multiprocessing_works_in_worker(
    make_job: MakeJob, method: str, form: str, start: str
) -> None:
    job = make_job()
    job.script(CHILDREN)
    program = ["script.py"] if form == "script" else ["-m", "script"]
    actual = as_worker(job, start, *program, method)
    assert actual == Run(0, "True 2 True\nTrue 4 True\nfrom the child\n3\ndone\n", "")


def test_executors_and_subprocess_work_in_worker(make_job: MakeJob) -> None:
    job = make_job()
    job.script("""
        import concurrent.futures, subprocess, sys
        def square(number):
            return number * number
        if __name__ == "__main__":
            with concurrent.futures.ProcessPoolExecutor(2) as pool:
                print(list(pool.map(square, range(4))))
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                print(list(pool.map(square, range(4))))
            command = [sys.executable, "-c", "print('a child')"]
            print(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    """)
    assert as_worker(job, "fork", "script.py") == Run(
        0, "[0, 1, 4, 9]\n[0, 1, 4, 9]\na child\n\n", ""
    )


# -- random state and threads of ranks -------------------------------------------------------------


def each_rank(job: Job, text: str, count: int = 3) -> list[Any]:
    job.script(text)
    assert (
        job.start(
            0, "--start", "fork", "--nproc-per-node", str(count), "script.py", python=WITH_TORCH
        ).wait(TEST_TIMEOUT)
        == 0
    )
    return [json.loads(job.log(0, f"rank{rank}.out")) for rank in range(count)]


DRAWS = """
    import json, random, sys, uuid, secrets, tempfile
    # torch imports numpy. A preloaded torch itself appears only when the script imports it.
    preloaded = "numpy" in sys.modules
    import numpy, torch
    print(json.dumps({
        "random": random.random(), "numpy": numpy.random.rand(),
        "new": numpy.random.default_rng().random(), "uuid": str(uuid.uuid4()),
        "secret": secrets.token_hex(), "file": next(tempfile._get_candidate_names()),
        "seed": torch.initial_seed(), "torch": torch.rand(1).item(),
        "permutation": torch.randperm(1000).tolist(), "preloaded": preloaded,
    }))
"""


def test_forked_ranks_draw_random_numbers_like_separate_processes(make_job: MakeJob) -> None:
    ranks = each_rank(make_job(), DRAWS)
    assert all(rank.pop("preloaded") for rank in ranks), (
        "the workers were not forked from a forkserver that had imported torch"
    )
    command = [sys.executable, "-c", textwrap.dedent(DRAWS)]
    bare = json.loads(
        subprocess.run(command, check=True, capture_output=True, timeout=TEST_TIMEOUT).stdout
    )
    for name in ranks[0]:
        drawn = [rank[name] for rank in ranks]
        # Some versions of torch seed the generator at random, others with a constant.
        all_differ = len(set(map(str, drawn))) == len(drawn)
        assert all_differ or drawn == [bare[name]] * len(drawn), f"{name}: {drawn}"


UNFINISHED = """
    import os, signal, sys
    signal.signal(signal.SIGALRM, lambda *_: print("signal,", end=""))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    print("text,", end="")
    sys.stdout.buffer.write(b"bytes,")
    os.write(1, b"descriptor,")
    os.system("printf child,")
    sys.stderr.write("error without newline")
    print("x" * 9_000_000, end="")
    signal.setitimer(signal.ITIMER_REAL, 0)
    print("end", end="")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("start", STARTS)
def test_killed_worker_leaves_all_it_wrote_in_order_even_without_newline(
    make_job: MakeJob, start: str
) -> None:
    job = make_job()
    ended = as_worker(job, start, job.script(UNFINISHED))
    text = ended.out.replace("signal,", "")
    assert text[:40] == "text,bytes,descriptor,child,xxxxxxxxxxxx"
    assert text.endswith("xend")
    assert ended.err.splitlines()[0] == "error without newline"
    if start == "fork":  # `python -u` loses text when a signal interrupts a long write
        assert len(text) == len("text,bytes,descriptor,child,end") + 9_000_000


@pytest.mark.parametrize("kind", ["directory", "zipapp", "bytecode"])
def test_program_that_is_no_source_file_runs_by_exec(tmp_path: Path, kind: str) -> None:
    app = new_folder(tmp_path / "app")
    write_tree(
        app,
        **{
            "helper.py": "WORD = 'helped'",
            "__main__.py": "import helper\nprint(helper.WORD, __name__)",
        },
    )
    (tmp_path / "plain.py").write_text("print('helped', __name__)")
    if kind == "zipapp":
        zipapp.create_archive(app, tmp_path / "app.pyz")
    py_compile.compile(str(tmp_path / "plain.py"), str(tmp_path / "plain.pyc"))
    target = {"directory": "app", "zipapp": "app.pyz", "bytecode": "plain.pyc"}[kind]
    ran = run([sys.executable, "-m", "clusterjob", "launch", target], tmp_path)
    assert (ran.code, ran.out) == (0, "[0] helped __main__\n"), ran.err


def test_module_beside_the_script_is_found_before_a_loaded_one_of_python(tmp_path: Path) -> None:
    own = new_folder(tmp_path / "own")
    for name in ("secrets", "statistics", "profile"):
        (own / f"{name}.py").write_text(f"OWN = {name!r}")
    (own / "main.py").write_text(
        "import secrets, statistics, profile\nprint(secrets.OWN, statistics.OWN, profile.OWN)"
    )
    command = [sys.executable, "-m", "clusterjob", "launch", "--start", "fork", "own/main.py"]
    ran = run(command, tmp_path)
    assert (ran.code, ran.out) == (0, "[0] secrets statistics profile\n"), ran.err


@pytest.mark.parametrize("start", STARTS)
def test_traceback_shows_no_frame_of_the_hook(tmp_path: Path, start: str) -> None:
    (tmp_path / "main.py").write_text(
        "import os, signal\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "def again(*_):\n"
        "    dist.init_process_group('gloo')\n"
        "signal.signal(signal.SIGTERM, again)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    command = [sys.executable, "-m", "clusterjob", "launch", "--start", start, "main.py"]
    ran = run(command, tmp_path)
    files = re.findall(r'File ".*?([^/"]+)", line', ran.err.partition("FAILED")[0])
    assert files[:2] == ["main.py", "main.py"], ran.err
    assert set(files[2:]) == {"c10d_logger.py", "distributed_c10d.py"}, ran.err
