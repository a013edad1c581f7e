"""Settings: precedence of layers, origin of each value, and errors for wrong files."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clusterjob.core.config import Settings, resolve
from clusterjob.core.config_files import find_files
from clusterjob.errors import ConfigError, UnknownCluster

BACKENDS = ("local", "slurm", "ssh")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a project directory with subdirectories."""
    directory = tmp_path / "project"
    (directory / "src" / "deep").mkdir(parents=True)
    return directory


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def user_file(text: str) -> Path:
    return write(Path(os.environ["XDG_CONFIG_HOME"]) / "clusterjob" / "config.toml", text)


def settings(
    directory: Path,
    cluster: str | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Settings:
    return resolve(
        flags or {}, cluster, environ=environ or {}, directory=directory, backends=BACKENDS
    )


# -- layers ----------------------------------------------------------------------------------------


def test_settings_without_files_use_first_backend(project: Path) -> None:
    assert settings(project) == Settings("local", "local", values={}, origins={})


def test_higher_layer_wins_and_is_recorded_as_origin(project: Path) -> None:
    user = user_file(
        "[defaults]\nnodes = 1\nmax_restarts = 1\ngrace = 1\ntime = '1m'\nmem = '1G'\nname = 'u'\n"
        "[clusters.lab]\ngrace = 2\n"
    )
    own = write(
        project / "clusterjob.toml",
        "[defaults]\nmax_restarts = 2\ngrace = 3\ntime = '2m'\nmem = '2G'\n"
        "[clusters.lab]\nbackend = 'ssh'\ntime = '3m'\nmem = '3G'\n",
    )
    found = settings(
        project,
        "lab",
        {"CLUSTERJOB_MEM": "4G", "CLUSTERJOB_NPROC_PER_NODE": "4"},
        {"nproc_per_node": "5"},
    )
    assert (found.cluster, found.backend) == ("lab", "ssh")
    assert {key: (value, found.origins[key]) for key, value in found.values.items()} == {
        "nodes": (1, f"{user}: [defaults] nodes"),
        "name": ("u", f"{user}: [defaults] name"),
        "max_restarts": (2, f"{own}: [defaults] max_restarts"),
        "grace": (2.0, f"{user}: [clusters.lab] grace"),
        "time": (180, f"{own}: [clusters.lab] time"),
        "mem": (4 * 1024**3, "CLUSTERJOB_MEM"),
        "nproc_per_node": (5, "--nproc-per-node"),
    }


def test_tables_and_lists_are_merged_from_lowest_layer_up(project: Path) -> None:
    user = user_file("[defaults]\nenv = {A = 'user', B = 'user'}\nsetup = 'first'\n")
    own = write(
        project / "clusterjob.toml",
        "[clusters.local]\nenv = {B = 'own', C = 3, D = true, E = 0.5}\n"
        "setup = ['second', 'third']\nset = {x = 1}\n",
    )
    found = settings(
        project, flags={"env": ["C=flag", "F=a=b", "G="], "setup": ["fourth"], "set": ["y=2"]}
    )
    assert found.values == {
        "env": {"A": "user", "B": "own", "C": "flag", "D": "true", "E": "0.5", "F": "a=b", "G": ""},
        "setup": ("first", "second", "third", "fourth"),
        "set": {"x": "1", "y": "2"},
    }
    assert found.origins["env"] == f"{user}: [defaults] env; {own}: [clusters.local] env; --env"
    assert (
        found.origins["setup"]
        == f"{user}: [defaults] setup; {own}: [clusters.local] setup; --setup"
    )


def test_empty_or_mergeable_environment_variables_are_ignored(
    project: Path,
) -> None:
    environ = {
        "CLUSTERJOB_NODES": "",
        "CLUSTERJOB_ENV": "A=1",
        "CLUSTERJOB_SETUP": "x",
        "CLUSTERJOB_SET": "x=1",
        "CLUSTERJOB_JOB_ID": "j",
        "NODES": "3",
    }
    assert settings(project, environ=environ).values == {}


# -- selection of the cluster ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cluster", "environ", "expected"),
    [
        (None, {}, ("lab", "ssh")),
        (None, {"CLUSTERJOB_CLUSTER": "slurm"}, ("slurm", "slurm")),
        ("ssh", {"CLUSTERJOB_CLUSTER": "slurm"}, ("ssh", "ssh")),
    ],
)
def test_cluster_is_chosen_by_highest_layer_that_names_one(
    project: Path, cluster: str | None, environ: dict[str, str], expected: tuple[str, str]
) -> None:
    user_file("cluster = 'local'\n")
    write(project / "clusterjob.toml", "cluster = 'lab'\n[clusters.lab]\nbackend = 'ssh'\n")
    found = settings(project, cluster, environ)
    assert (found.cluster, found.backend) == expected


@pytest.mark.parametrize(
    ("profile", "backend"), [("nodes = 2", "slurm"), ("backend = 'local'", "local")]
)
def test_profile_named_like_a_backend_may_omit_its_backend(
    project: Path, profile: str, backend: str
) -> None:
    write(project / "clusterjob.toml", f"[clusters.slurm]\n{profile}\n")
    assert settings(project, "slurm").backend == backend


@pytest.mark.parametrize(
    ("cluster", "environ", "chosen_at"),
    [
        ("lba", {}, "--cluster"),
        (None, {"CLUSTERJOB_CLUSTER": "lba"}, "CLUSTERJOB_CLUSTER"),
        (None, {}, ""),
    ],
)
def test_unknown_cluster_error_names_origin_and_nearest_name(
    project: Path, cluster: str | None, environ: dict[str, str], chosen_at: str
) -> None:
    path = user_file("cluster = 'lba'\n")
    write(project / "clusterjob.toml", "[clusters.lab]\nbackend = 'local'\n")
    with pytest.raises(UnknownCluster) as caught:
        settings(project, cluster, environ)
    assert caught.value.message == f"there is no cluster 'lba' ({chosen_at or path})"
    assert caught.value.hint == "did you mean lab?"


# -- search for files ------------------------------------------------------------------------------


def test_project_file_is_searched_in_parent_directories(project: Path) -> None:
    far = write(project / "clusterjob.toml", "[defaults]\nnodes = 1\nname = 'far'\n")
    assert [file.path for file in find_files(project / "src" / "deep")] == [far]
    near = write(project / "src" / "clusterjob.toml", "[defaults]\nnodes = 2\n")
    assert settings(project / "src" / "deep").values == {"nodes": 2}
    assert settings(project / "src" / "deep").origins == {"nodes": f"{near}: [defaults] nodes"}


def test_pyproject_table_holds_cluster_and_profile(project: Path) -> None:
    path = write(
        project / "pyproject.toml",
        """
        [project]
        name = "x"
        [tool.clusterjob]
        cluster = "lab"
        [tool.clusterjob.clusters.lab]
        backend = "ssh"
        nodes = 2
        """,
    )
    found = settings(project / "src")
    assert (found.cluster, found.backend, found.values) == ("lab", "ssh", {"nodes": 2})
    assert found.origins == {"nodes": f"{path}: [clusters.lab] nodes"}


@pytest.mark.parametrize(
    "text",
    [
        "[project]\nname = 'x'\n",
        "# [tool.clusterjob] may be written here\n[project]\nname = 'x'\n",
        "[tool.clusterjob-extras]\nnodes = 2\n",
        "[tool.other]\ntext = '''\n[tool.clusterjob]\n'''\n",
        "[project\n",
    ],
)
def test_pyproject_without_clusterjob_table_is_skipped(project: Path, text: str) -> None:
    write(project / "src" / "pyproject.toml", text)
    write(project / "clusterjob.toml", "[defaults]\nnodes = 2\n")
    assert settings(project / "src").values == {"nodes": 2}


@pytest.mark.parametrize(
    "text",
    [
        "tool.clusterjob.defaults.nodes = 2\n",
        "[tool]\nclusterjob = {defaults = {nodes = 2}}\n",
        "[tool . clusterjob.defaults]\nnodes = 2\n",
        "[tool.'clusterjob'.defaults]\nnodes=2\n",
        "[tool.clusterjob.defaults]\nnodes = 2\n",
    ],
)
def test_pyproject_table_is_found_in_any_toml_spelling(project: Path, text: str) -> None:
    write(project / "pyproject.toml", text)
    assert settings(project).values == {"nodes": 2}


def test_clusterjob_toml_takes_precedence_over_pyproject(project: Path) -> None:
    write(project / "pyproject.toml", "[tool.clusterjob.defaults]\nnodes = 1\n")
    write(project / "clusterjob.toml", "[defaults]\nnodes = 2\n")
    assert settings(project).values == {"nodes": 2}


# -- errors in files -------------------------------------------------------------------------------


DESCRIBES = "`clusterjob submit --help` describes each option"


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("default = 1\n", "default is not a known key", "did you mean defaults?"),
        ("zzz = 1\n", "zzz is not a known key", "cluster"),
        ("[defaults]\nnodse = 1\n", "[defaults] nodse is not a known key", "did you mean nodes?"),
        (
            "[defaults]\nbackend = 'local'\n",
            "[defaults] backend is not a known key",
            "use one of nodes",
        ),
        (
            "[clusters.lab]\nbackned = 'local'\n",
            "[clusters.lab] backned is not a known key",
            "did you mean backend?",
        ),
        ("cluster = 3\n", "cluster is not a name", 'write cluster = "NAME"'),
        (
            "[cluster.hpc]\nbackend = 'slurm'\n",
            "[cluster.hpc] is not a profile",
            "write it as [clusters.hpc]",
        ),
        ("defaults = 3\n", "defaults is not a table", "[defaults]"),
        ("clusters = 3\n", "clusters is not a table", "[clusters]"),
        ("clusters.lab = 3\n", "[clusters] lab is not a table", "`clusterjob config`"),
        ("[defaults]\nnodes = 'two'\n", "[defaults] nodes: 'two' is not a whole number", DESCRIBES),
        ("[defaults]\nnodes = true\n", "[defaults] nodes: True is not a whole number", DESCRIBES),
        ("[defaults]\nnodes = 1.5\n", "[defaults] nodes: 1.5 is not a whole number", DESCRIBES),
        (
            "[defaults]\nmem = '12 potatoes'\n",
            "[defaults] mem: '12 potatoes' is not a memory size",
            "64G",
        ),
        ("[defaults]\ntime = 'soon'\n", "[defaults] time: 'soon' is not a duration", "90s"),
        ("[defaults]\nname = 3\n", "[defaults] name: 3 is not a text", DESCRIBES),
        ("[defaults]\nworkdir = 3\n", "[defaults] workdir: 3 is not a text", DESCRIBES),
        (
            "[defaults]\nenv = 3\n",
            "[defaults] env: 3 is not a table of names and values",
            DESCRIBES,
        ),
        (
            "[defaults]\nenv = 'A=1'\n",
            "[defaults] env: 'A=1' is not a table of names and values",
            DESCRIBES,
        ),
        (
            "[defaults]\nenv = {A = [1]}\n",
            "[defaults] env: [1] is not a text or a number",
            DESCRIBES,
        ),
        ("[defaults]\nsetup = 3\n", "[defaults] setup: 3 is not a list of lines", DESCRIBES),
        ("[defaults]\nsetup = ['x', 3]\n", "[defaults] setup: 3 is not a text", DESCRIBES),
        (
            "[defaults]\nrequire_gpus = 'maybe'\n",
            "[defaults] require_gpus: 'maybe' is neither true nor false",
            DESCRIBES,
        ),
        (
            "[defaults]\ngrace = 'x'\n",
            "[defaults] grace: 'x' is not a number of seconds",
            DESCRIBES,
        ),
        (
            "[clusters.local]\nnodes = 'two'\n",
            "[clusters.local] nodes: 'two' is not a whole number",
            DESCRIBES,
        ),
        (
            "[clusters.local]\nbackend = 3\n",
            "[clusters.local] names no known backend (3)",
            "use one of local",
        ),
        ("[clusters.local]\nbackend = 'slrum'\n", "'slrum'", "did you mean slurm?"),
        (
            "[defaults]\ntime = 7200\n",
            "[defaults] time: 7200 has no unit",
            'write time = "7200m" or time = "7200s"',
        ),
        ("[defaults\n", " is not valid TOML: ", "a text needs quotes"),
        ("[defaults]\nnodes = \n", "line 2,", ""),
        ("[defaults]\n\nnodes = 1\nnodes = 2\n", "line 4,", ""),
        ("x = [\n1,\n", "end of document", ""),
    ],
)
def test_wrong_key_or_value_error_names_file_and_key(
    project: Path, text: str, message: str, hint: str
) -> None:
    path = write(project / "clusterjob.toml", text)
    with pytest.raises(ConfigError) as caught:
        settings(project)
    assert caught.value.message.startswith(str(path))
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert "\n" not in caught.value.message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        ({"cpus_per_task": "x"}, {}, "--cpus-per-task: 'x' is not a whole number"),
        ({}, {"CLUSTERJOB_NODES": "two"}, "CLUSTERJOB_NODES: 'two' is not a whole number"),
        ({"env": ["A"]}, {}, "--env: 'A' is not KEY=VALUE"),
    ],
)
def test_wrong_value_error_names_flag_or_variable(
    project: Path, flags: dict[str, Any], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        settings(project, environ=environ, flags=flags)


@given(st.binary(max_size=60))
@example(b"name = '\xff\xfe'\n")
def test_any_file_content_is_accepted_or_gives_config_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any" / "clusterjob.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    try:
        settings(path.parent)
    except (ConfigError, UnknownCluster) as error:
        message = error.message
    else:
        return
    assert str(path) in message


def test_paths_in_file_are_relative_to_file(project: Path) -> None:
    """A path on the command line is relative to the current directory."""
    write(
        project / "clusterjob.toml",
        "[defaults]\ntemplate = 'mine.j2'\n[clusters.local]\nworkdir = 'runs'\n",
    )
    below = project / "src" / "deep"
    values = settings(below, "local").values
    assert values == {"template": project / "mine.j2", "workdir": project / "runs"}
    assert settings(below, "local", flags={"workdir": "here"}).values["workdir"] == below / "here"
