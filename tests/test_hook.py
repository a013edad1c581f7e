"""The hook in every Python process of a job: groups that are freed late, stores at the script's own address, a chained sitecustomize."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from launching import ROOT, free_port, launch, script

from clusterjob.node.workers import hook_directory, torch_changes

MODES = ["fork", "exec"]

# A function makes the model and ends its group: the model is freed after it. A corner of the store for each round, so that
# nothing but that can go wrong in a torch without the hook.
FREED_LATE = """
    import os
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    store, rank, world_size = next(dist.rendezvous("env://"))

    def train(round):
        dist.init_process_group("gloo", store=dist.PrefixStore(f"round{round}", store), rank=rank, world_size=world_size)
        half = dist.new_group([0, 1])
        models = [DDP(torch.nn.Linear(16, 16))]
        if rank < 2:
            models.append(DDP(torch.nn.Linear(16, 16), process_group=half))
        for _ in range(5):
            for model in models:
                model(torch.randn(4, 16)).square().mean().backward()
        dist.destroy_process_group()

    for round in range(8):
        train(round)
    print("ended well")
"""


def unfolded(text: str) -> list[str]:
    """Return the lines of output with one rank each, in the order of ranks: alike ones may be folded or not."""
    found = []
    for line in text.splitlines():
        ranks, _, rest = line.removeprefix("[").partition("] ")
        for part in ranks.split(","):
            first, _, last = part.partition("-")
            found += [f"[{rank}] {rest}" for rank in range(int(first), int(last or first) + 1)]
    return sorted(found)


@pytest.mark.parametrize("mode", MODES)
def test_models_that_are_freed_after_their_groups_neither_hang_nor_abort(tmp_path: Path, mode: str) -> None:
    ended = launch(mode, 3, [script(tmp_path, FREED_LATE)], tmp_path)
    assert ended.code == 0, ended.err
    assert {f"[{rank}] ended well" for rank in range(3)} == set(unfolded(ended.out))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_classic_script_ends_well_each_time(tmp_path: Path, mode: str) -> None:
    classic = script(tmp_path, """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        def main():
            dist.init_process_group("gloo")
            model = DDP(torch.nn.Linear(32, 32))
            for _ in range(10):
                model(torch.randn(8, 32)).square().mean().backward()
            dist.destroy_process_group()

        main()
    """)  # fmt: skip
    ended = [launch(mode, 4, [classic], tmp_path) for _ in range(10)]
    assert [each.code for each in ended] == [0] * 10, [each.err for each in ended if each.code]


@pytest.mark.parametrize("own_port", [True, False])
def test_groups_one_after_another_meet_and_keep_no_more_files_and_threads(tmp_path: Path, own_port: bool) -> None:
    program = f"""
        import os
        import torch, torch.distributed as dist
        if {own_port}:
            os.environ["MASTER_PORT"] = "{free_port()}"

        def used():
            return len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task"))

        counts = []
        for _ in range(12):
            dist.init_process_group("gloo")
            group = dist.new_group([0, 1])
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == 4
            dist.destroy_process_group()
            counts.append(used())
        assert counts[-1] <= counts[2], counts
        print("met twelve times")
    """
    ended = launch("fork", 2, [script(tmp_path, program)], tmp_path)
    assert ended.code == 0, ended.err
    assert unfolded(ended.out) == ["[0] met twelve times", "[1] met twelve times"]


# -- the script's own meeting point ----------------------------------------------------------------------------------------

MEET = """
import os, sys
import torch, torch.distributed as dist
import torch.multiprocessing as mp

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PORT = sys.argv[1]

def meet(*args, **options):
    dist.init_process_group("gloo", *args, **options)
    total = torch.ones(1)
    dist.all_reduce(total)
    sys.stdout.write(f"all are {int(total.item())}\\n")  # whole, where two processes write into one pipe
    sys.stdout.flush()
    dist.destroy_process_group()

def tutorial(rank, world_size):  # https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = PORT
    meet(rank=rank, world_size=world_size)

def imagenet(local, url):  # https://github.com/pytorch/examples/blob/main/imagenet/main.py, --multiprocessing-distributed
    meet(init_method=url, rank=RANK * 2 + local, world_size=WORLD * 2)
"""

# How the processes meet, and how many workers there are: each is to meet one other.
FORMS = {
    "spawned": (1, "mp.spawn(tutorial, args=(2,), nprocs=2)"),
    "forked": (1, "mp.start_processes(tutorial, args=(2,), nprocs=2, start_method='fork')"),
    "imagenet by tcp": (1, "mp.spawn(imagenet, args=('tcp://127.0.0.1:' + PORT,), nprocs=2)"),
    "imagenet by env": (1, "mp.spawn(imagenet, args=('env://',), nprocs=2)"),
    "own port": (2, "os.environ['MASTER_PORT'] = PORT; meet()"),
    "tcp": (2, "meet(init_method='tcp://127.0.0.1:' + PORT, rank=RANK, world_size=WORLD)"),
    "file": (2, "meet(init_method='file://' + os.path.abspath('meeting'), rank=RANK, world_size=WORLD)"),
    "the job's, by another name": (2, "os.environ['MASTER_ADDR'] = 'localhost'; meet()"),
    "the job's": (2, "meet()"),
}


def meeting_script(directory: Path, last: str) -> Path:
    return script(directory, f"{MEET}\nif __name__ == '__main__':\n    {last}\n")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_a_script_that_names_its_own_meeting_point_meets_there(tmp_path: Path, form: str, mode: str) -> None:
    nproc, last = FORMS[form]
    ended = launch(mode, nproc, [meeting_script(tmp_path, last), free_port()], tmp_path)
    assert ended.code == 0, ended.err
    assert "all are 2" in ended.out
    assert not (tmp_path / "meeting").exists()  # which would stop the next run


def test_workers_of_a_torchrun_that_a_worker_starts_are_its_own(tmp_path: Path) -> None:
    inner = meeting_script(tmp_path, "meet()")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", inner, "0"]
    ended = launch("exec", 1, ["--", *torchrun], tmp_path)
    assert ended.code == 0, ended.err
    assert ended.out.count("all are 2") == 2


@pytest.mark.parametrize(
    ("last", "who"),
    [
        ("meet(init_method='tcp://127.0.0.1:' + PORT, rank=1, world_size=2)", "the address is that of init_method"),
        ("os.environ['MASTER_PORT'] = PORT; os.environ['RANK'] = '1'; meet(rank=1, world_size=2)", "the script has set MASTER_PORT=PORT"),
    ],
)
def test_a_wait_for_a_store_that_nobody_serves_is_explained_within_ten_seconds(tmp_path: Path, last: str, who: str) -> None:
    port = str(free_port())
    program = meeting_script(tmp_path, f"import threading; threading.Timer(20, os._exit, [7]).start(); {last}")
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "clusterjob.node", "--start", "fork", program, port], stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    with process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "nobody listens" in line)
        waited = time.monotonic() - begin
        process.terminate()
        process.stderr.read()
    assert waited < 10 + torch_changes._WAITING_NOTICE * 3  # the import of torch is not the wait
    assert f"nobody listens at 127.0.0.1:{port}, where this process waits for rank 0's store (Connection refused)" in line
    assert who.replace("PORT=PORT", f"PORT={port}") in line
    assert "(train.py line " in line
    assert "; the store of the job is at 127.0.0.1:" in line


def test_an_address_is_the_agents_where_name_and_port_lead_to_their_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(torch_changes.STORE, "127.0.0.1:2345")
    assert torch_changes.served_at("127.0.0.1", 2345) == "127.0.0.1"
    assert torch_changes.served_at("localhost", 2345) == "localhost"
    assert torch_changes.served_at("127.0.0.1", 2346) is None
    assert torch_changes.served_at("192.0.2.1", 2345) is None
    monkeypatch.setenv(torch_changes.STORE, "192.0.2.1:2345")
    assert torch_changes.served_at("localhost", 2345) is None  # another machine's
    monkeypatch.setenv(torch_changes.STORE, "")
    assert torch_changes.served_at("127.0.0.1", 2345) is None


def test_every_name_of_this_machine_is_the_agents_where_their_store_is_at_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        own = probe.getsockname()[0]
    monkeypatch.setenv(torch_changes.STORE, "127.0.0.1:2345")
    assert torch_changes.served_at(own, 2345) == "127.0.0.1"
    assert torch_changes.served_at(own, 2346) is None


def test_the_file_of_a_meeting_that_the_script_has_removed_does_not_come_back(tmp_path: Path) -> None:
    class FileStore:
        path = str(tmp_path / "meeting")

        def add(self, key: str, number: int) -> int:
            Path(self.path).touch()
            return number

    torch_changes._leave_file(FileStore(), 2)
    assert not (tmp_path / "meeting").exists()


def test_localhost_is_the_agents_on_the_machine_that_serves_their_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        own = probe.getsockname()[0]
    monkeypatch.setenv(torch_changes.STORE, f"{own}:2345")
    assert torch_changes.served_at("localhost", 2345) == own


# -- as sitecustomize --------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Return a PYTHONPATH as workers have it, with a sitecustomize and a usercustomize of the user's."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import builtins; builtins.from_site = True\n")
    (own / "usercustomize.py").write_text("import builtins; builtins.from_user = True\n")
    return hook_directory.variables({"PYTHONPATH": str(own)}, hook_directory.write(tmp_path))["PYTHONPATH"]


def python(path: str, code: str, *flags: str, interpreter: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | ({"PYTHONPATH": path} if path else {})
    return subprocess.run([interpreter, *flags, "-c", textwrap.dedent(code)], env=environ, capture_output=True, text=True, check=False)


LOADED = "import sys; print(sum(getattr(finder, 'of_clusterjob', False) for finder in sys.meta_path), 'torch' in sys.modules)"


def test_the_users_sitecustomize_runs_and_the_hooks_directory_is_not_on_sys_path(path: str) -> None:
    told = python(path, f"""
        import builtins, sitecustomize
        {LOADED}
        print(builtins.from_site, sitecustomize.__file__.endswith("own/sitecustomize.py"), {path.partition(os.pathsep)[0]!r} in sys.path)
    """)  # fmt: skip
    assert (told.stdout, told.stderr) == ("1 False\nTrue True False\n", "")


def test_the_users_usercustomize_runs_where_python_runs_it(path: str) -> None:
    base = Path(sys.base_prefix) / "bin" / "python3"  # a virtual environment has none
    told = python(path, "import builtins, site; print(site.ENABLE_USER_SITE == hasattr(builtins, 'from_user'))", interpreter=str(base))
    assert (told.stdout, told.stderr) == ("True\n", "")


def test_an_error_in_the_users_sitecustomize_is_shown_as_always(path: str) -> None:
    own = Path(path.split(os.pathsep)[1]) / "sitecustomize.py"
    own.write_text("import a_module_that_is_missing\n")
    assert python(path, "print(1)").stderr == python(str(own.parent), "print(1)").stderr != ""


@pytest.mark.parametrize("flag", ["-S", "-I", "-E"])
def test_pythons_that_load_no_sitecustomize_of_pythonpath_run_without_the_hook(path: str, flag: str) -> None:
    told = python(path, LOADED, flag)
    assert (told.returncode, told.stdout, told.stderr) == (0, "0 False\n", "")


def test_the_hook_of_a_job_inside_another_is_installed_once(path: str, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    inner = hook_directory.variables({"PYTHONPATH": path}, hook_directory.write(tmp_path / "inner"))["PYTHONPATH"]
    told = python(inner, f"{LOADED}; import builtins; print(builtins.from_site)")
    assert (told.stdout, told.stderr) == ("1 False\nTrue\n", "")


def test_the_hook_outlives_its_directory_and_does_without_one(tmp_path: Path) -> None:
    assert python(str(tmp_path / "gone"), LOADED).stdout == "0 False\n"
    assert hook_directory.write(tmp_path / "gone") is None
    assert hook_directory.variables({"PYTHONPATH": "/mine"}, None) == {}


def test_a_process_that_is_no_job_of_ours_has_torchs_own_behaviour(path: str) -> None:
    told = python(path, """
        import os
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
        import sys, torch.distributed
        rendezvous = sys.modules['torch.distributed.rendezvous']  # the package has a function of this name
        print(rendezvous._torchelastic_use_agent_store(), hasattr(rendezvous._create_c10d_store, "__wrapped__"))
    """)  # fmt: skip
    assert told.stdout == "True True\n", told.stderr


def test_other_finders_neither_stop_the_import_of_torch_nor_change_it_twice(path: str) -> None:
    told = python(path, """
        import sys

        class Old:
            def find_module(self, name, path=None):
                return None

        class Chaining:
            busy = False

            def find_spec(self, name, path=None, target=None):
                if self.busy or "torch.distributed.rendezvous" != name:
                    return None
                self.busy = True
                try:
                    found = (finder.find_spec(name, path, target) for finder in sys.meta_path if hasattr(finder, "find_spec"))
                    return next(filter(None, found))
                finally:
                    self.busy = False

        sys.meta_path[:0] = [Chaining()]
        sys.meta_path.insert(2, Old())  # after the hook's own
        sys.meta_path.insert(3, Chaining())
        import torch.distributed
        create = sys.modules["torch.distributed.rendezvous"]._create_c10d_store
        print(hasattr(create, "__wrapped__"), hasattr(create.__wrapped__, "__wrapped__"))
    """)  # fmt: skip
    assert told.stdout == "True False\n", told.stderr


def test_every_import_of_the_hook_is_of_the_standard_library() -> None:
    told = python(str(ROOT), "import sys; before = set(sys.modules); from clusterjob.node.workers import hook; hook.install()\n"
                  "print(sorted(name for name in set(sys.modules) - before if not name.startswith('clusterjob')))")  # fmt: skip
    assert told.stdout == "['__future__']\n", told.stderr
