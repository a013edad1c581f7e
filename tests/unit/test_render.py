"""Templates: refused input, and values that pass through a real bash byte for byte."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from launching import executable, new_folder
from procs import TEST_TIMEOUT

from clusterjob.core.render import (
    in_shell,
    render,
    sh,
    sh_words,
)
from clusterjob.core.spec import JobSpec, launch_arguments
from clusterjob.errors import SpecError, TemplateError
from clusterjob.node.options import parse
from clusterjob.node.program import Program

HOSTILE = (
    "'",
    '"',
    "\\",
    "`",
    "$",
    "$(touch pwned)",
    "`touch pwned`",
    "${HOME}",
    "\n",
    "\r",
    "\t",
    " ",
    ";",
    "&",
    "|",
    ">",
    "<",
    "*",
    "?",
    "[",
    "~",
    "!",
    "#",
    "{",
    "}",
    "(",
    ")",
    "=",
    "%",
    "-",
    "--",
    "-n",
    "'\"'\"'",
    "\\'",
    "$'x'",
    "{{ x }}",
    "{% x %}",
    "☃",
    "é",
    "\u2028",
    "\x7f",
    "\x01",
    "\x1b[31m",
)
VALUES: dict[str, Any] = {
    "job_id": "train-abc234",
    "job_dir": "/home/o'neil/.local/state/clusterjob/jobs/train-abc234",
    "name": "train",
    "token_file": "/home/o'neil/.local/state/clusterjob/jobs/train-abc234/token",
    "nnodes": 2,
    "master_addr": "127.0.0.1",
    "env": {"NCCL_DEBUG": "INFO", "GREETING": 'it\'s "$HOME"\nand more'},
    "workdir": "/data/my project",
    "setup": ["module load cuda/12", 'source "$HOME/venv/bin/activate"  # a comment'],
    "python": "/opt/py thon/bin/python3",
    "launch_arguments": [
        "--nproc-per-node",
        "4",
        "--lifeline",
        "--no-echo",
        "train.py",
        "--lr",
        "0.1",
        "a b",
        "",
    ],
}

# Bytes that a command line or a file name can hold, decoded as Python does (surrogateescape).
# Many of them have a meaning in a shell.
texts = st.one_of(
    st.lists(
        st.one_of(
            st.sampled_from(HOSTILE),
            st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=3),
        ),
        max_size=6,
    ).map("".join),
    st.binary(max_size=12).map(lambda data: os.fsdecode(data.replace(b"\0", b""))),
)
names = st.from_regex(r"V_[A-Za-z0-9_]{0,8}", fullmatch=True)
folders = texts.map(lambda text: text.replace("/", "")).filter(
    lambda text: text not in ("", ".", "..") and len(os.fsencode(text)) < 200
)


def template(directory: Path, text: str, name: str = "mine.sh.j2") -> Path:
    path = directory / name
    path.write_text(text)
    return path


# -- output of a template --------------------------------------------------------------------------


def read_by_bash(text: str) -> list[str]:
    done = subprocess.run(
        ["bash"],
        input=os.fsencode(f"for word in {text}; do printf '%s\\0' \"$word\"; done\n"),
        capture_output=True,
        check=True,
    )
    return [os.fsdecode(word) for word in done.stdout.split(b"\0")[:-1]]


@settings(max_examples=50)
@given(st.lists(texts))
def test_quoted_words_are_read_unchanged_by_bash(words: list[str]) -> None:
    assert read_by_bash(sh_words(words)) == words
    assert read_by_bash(" ".join(sh(word) for word in words)) == words
    assert "\r" not in sh_words(words)


@given(pieces=st.lists(texts, min_size=1, max_size=3), place=folders)
def test_path_known_only_on_node_is_read_from_variable(pieces: list[str], place: str) -> None:
    path = "/0123456789abcdef"
    words = in_shell([path.join(pieces), path, "none of it"], path, variable='"$PLACE"')
    script = f"printf '%s\\0' {sh_words(words)} {sh(words[1])}"
    done = subprocess.run(
        ["bash", "-c", script],
        env={"PLACE": place},
        capture_output=True,
        timeout=TEST_TIMEOUT,
        check=True,
    )
    assert done.stdout.split(b"\0")[:-1] == [
        os.fsencode(place).join(map(os.fsencode, pieces)),
        *map(os.fsencode, (place, "none of it", place)),
    ]
    assert in_shell({"a": path}, path, variable="x") == {"a": path}


@pytest.mark.parametrize(
    "expression",
    [
        "workdir",
        "'x' ~ workdir",
        "env",
        "env['GREETING']",
        "setup",
        "setup[0]",
        "workdir|upper",
        "workdir|sh|upper",
        "workdir|sh ~ 'x'",
        "launch_arguments|join(' ')",
        "none",
        "1.5",
        "workdir|e",
    ],
)
def test_unquoted_value_is_refused(tmp_path: Path, expression: str) -> None:
    path = template(tmp_path, f"#!/bin/bash\n\necho {{{{ {expression} }}}}\n")
    with pytest.raises(TemplateError, match="without quoting") as caught:
        render(path, VALUES)
    assert f"{path}, line 3: " in caught.value.message
    assert "sh" in caught.value.message + caught.value.hint
    assert "\n" not in caught.value.message


def test_numbers_and_quoted_values_are_rendered(tmp_path: Path) -> None:
    text = (
        "{{ nnodes }} {{ nnodes * 8 }} {{ workdir|sh }} {{ ('at ' ~ workdir)|sh }} "
        "{{ launch_arguments|sh_words }} {{ setup[0]|verbatim }}"
    )
    assert shlex.split(render(template(tmp_path, text), VALUES)) == [
        "2",
        "16",
        "/data/my project",
        "at /data/my project",
        *VALUES["launch_arguments"],
        "module",
        "load",
        "cuda/12",
    ]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a\n{{ no_such|sh }}\n", 2, "no_such"),
        ("a\nb\n{{ no_such }}\n", 3, "no_such"),
        ("{% for x in no_such %}\n{{ x|sh }}\n{% endfor %}\n", 1, "no_such"),
        ("a\n{% if no_such == 'x' %}{% endif %}\n", 2, "no_such"),
        ("a\n{{ env.no_such|sh }}\n", 2, "no_such"),
        ("a\n\n\n{% include 'agent.sh.j2' %}\n{{ no_such|sh_words }}\n", 5, "no_such"),
        ("a\n{% if %}\n", 2, ""),
        ("{% for x in setup %}\n\n", 2, ""),
        ("a\n\n{{ workdir|shh }}\n", 3, ""),
        ("a\n{{ workdir|sh }\n", 2, ""),
        ("a\n{{ nnodes + workdir }}\n", 2, ""),
        ("a\n{{ nnodes|sh_words }}\n", 2, ""),
        ("a\nb\n{{ 1 // 0 }}\n", 3, ""),
        ("a\n{{ env.keys(1, 2, 3)|sh }}\n", 2, ""),
    ],
)
def test_broken_template_or_undefined_name_is_error_with_line(
    tmp_path: Path, text: str, line: int, message: str
) -> None:
    path = template(tmp_path, text)
    with pytest.raises(TemplateError) as caught:
        render(path, VALUES)
    assert f"{path}, line {line}: " in caught.value.message
    assert message in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nosuch.j2", "nosuch"),
        ("include.j2", r"absent\.j2'? does not exist"),
        ("latin.j2", r"latin\.j2 cannot be read"),
        ("", "' does not exist"),
    ],
)
def test_unreadable_template_is_error(tmp_path: Path, name: str, message: str) -> None:
    template(tmp_path, "{% include 'absent.j2' %}", "include.j2")
    (tmp_path / "latin.j2").write_bytes(b"# caf\xe9\n")
    with pytest.raises(TemplateError, match=message):
        render(tmp_path / name, VALUES)


NAMES = ("doing", "end", "key", "value", "line", "refuse", "script", "status", "code", "_X")


RESERVED = (
    "UID", "EUID", "GROUPS", "PPID", "RANDOM", "LINENO", "SHELLOPTS", "BASHOPTS", "BASH_VERSINFO",
    "DIRSTACK", "_",
)  # fmt: skip


def test_user_template_includes_neighbour_files_and_built_in_templates(
    tmp_path: Path, special_path: Path
) -> None:
    template(special_path, "# a neighbour of {{ name|sh }}\n", "neighbour.j2")
    text = render(
        template(
            special_path,
            "#!/bin/bash\n{% include 'neighbour.j2' %}\n{% include 'agent.sh.j2' %}",
            "m'ine ☃.j2",
        ),
        VALUES,
    )
    assert text.startswith("#!/bin/bash\n# a neighbour of train\n")
    assert text.endswith(render("agent.sh.j2", VALUES))


def test_template_syntax_in_values_is_not_rendered() -> None:
    text = render(
        "node.sh.j2", {**VALUES, "workdir": "{{ job_id }}{% raw %}", "setup": ["{{ job_id }}"]}
    )
    assert "'{{ job_id }}{% raw %}'" in text
    assert "{ :\n{{ job_id }}\n}" in text


# -- node script, run by a real bash ---------------------------------------------------------------


class Recorder:
    """Interpreter that prints its directory, arguments and environment."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.python = directory / "recorder"
        printer = (
            "import json, os, sys;print(json.dumps([os.getcwd(), sys.argv[1:], dict(os.environ)]))"
        )
        command = shlex.join([sys.executable, "-X", "utf8", "-SE", "-c", printer])
        executable(self.python, f'#!/bin/sh\nexec {command} "$@"\n')

    def run(
        self, script: str, job_dir: Path, variables: dict[str, str] | None = None
    ) -> tuple[str, list[str], dict[str, str]]:
        """Run a node's script as the backend does; return what the interpreter prints."""
        (job_dir / "ends").mkdir(parents=True, exist_ok=True)
        path = job_dir / "node.sh"
        path.write_bytes(script.encode(errors="surrogateescape"))
        inherited = {"PATH": os.environ["PATH"], "CLUSTERJOB_NODE_RANK": "0", **(variables or {})}
        done = subprocess.run(
            ["bash", str(path)], env=inherited, cwd=self.directory, capture_output=True,
            stdin=subprocess.DEVNULL, timeout=TEST_TIMEOUT, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, b"")
        directory, arguments, environ = json.loads(done.stdout)
        return directory, arguments, environ


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    return Recorder(tmp_path_factory.mktemp("recorder"))


@settings(max_examples=25)
@given(
    env=st.dictionaries(names, texts, max_size=4),
    workdir=folders,
    args=st.lists(texts, max_size=4),
    target=folders,
    name=folders,
)
@example(env={"V_": "it's\n"}, workdir="\n", args=["", "-m", "--", "\udcff"], target="-x", name="'")
@example(env={"V_": "'"}, workdir="-", args=["$(touch pwned)"], target="--", name="$(touch pwned)")
def test_hostile_values_reach_program_byte_for_byte(
    recorder: Recorder, env: dict[str, str], workdir: str, args: list[str], target: str, name: str
) -> None:
    place = new_folder(recorder.directory / "places" / workdir)
    (place / target).write_text("")
    job_dir = recorder.directory / "jobs" / name
    spec = JobSpec(
        Program("script", target, args=tuple(args)),
        place,
        name="job",
        python=str(recorder.python),
        env=env,
    )
    values = {
        **VALUES, "job_dir": str(job_dir), "env": dict(spec.env), "workdir": str(spec.workdir),
        "setup": [], "python": spec.python, "token_file": str(job_dir / "token"),
        "launch_arguments": launch_arguments(spec.launch_options(lifeline=True, echo=False)),
    }  # fmt: skip
    directory, arguments, environ = recorder.run(render("node.sh.j2", values), job_dir)
    assert os.fsencode(directory) == os.fsencode(place)
    assert os.fsencode(arguments[0]) == os.fsencode(job_dir / "clusterjob-node.pyz")
    parsed = parse(arguments[1:])
    assert [os.fsencode(word) for word in parsed.program.args] == [
        os.fsencode(word) for word in args
    ]
    assert os.path.normpath(os.fsencode(parsed.program.target)) == os.path.normpath(
        os.fsencode(target)
    )
    assert (parsed.program.kind, parsed.lifeline, parsed.echo) == ("script", True, False)
    assert {key: os.fsencode(environ[key]) for key in env} == {
        key: os.fsencode(value) for key, value in env.items()
    }
    assert os.fsencode(environ["CLUSTERJOB_TOKEN_FILE"]) == os.fsencode(job_dir / "token")
    assert not list(recorder.directory.rglob("pwned"))


def environment_from_node_script(
    recorder: Recorder,
    env: dict[str, str],
    setup: tuple[str, ...] = (),
    inherited: dict[str, str] | None = None,
) -> dict[str, str]:
    job_dir = recorder.directory / "jobs" / "env"
    values = {
        **VALUES,
        "job_dir": str(job_dir),
        "env": env,
        "workdir": str(recorder.directory),
        "setup": list(setup),
    }
    return recorder.run(
        render("node.sh.j2", {**values, "python": str(recorder.python)}), job_dir, inherited
    )[2]


def test_user_variables_with_names_used_in_script_are_kept(recorder: Recorder) -> None:
    mine = dict.fromkeys((*NAMES, "CDPATH"), "mine 1 2")
    assert environment_from_node_script(recorder, mine).items() >= mine.items()
    assert environment_from_node_script(recorder, {}, inherited=mine).items() >= mine.items()


def test_variable_reserved_by_bash_is_refused_or_passed_on(
    recorder: Recorder, tmp_path: Path
) -> None:
    """A user variable that is lost without a message is hard to find."""
    env = {}
    for name in RESERVED:
        with contextlib.suppress(SpecError):
            JobSpec(Program("command", "true"), tmp_path, env={name: "7"})
            env[name] = "7"
    assert environment_from_node_script(recorder, env).items() >= env.items()


def test_environment_changes_of_setup_lines_are_kept(recorder: Recorder) -> None:
    setup = (
        'export A="$A more"',
        "",
        "# only a comment",
        "export B=2; set -eu -o pipefail",
        "cat",  # its stdin is empty
        "true &",
        'unset C; export D="$CLUSTERJOB_NODE_RANK"',
        "IFS=0123456789",
    )
    environ = environment_from_node_script(recorder, {"A": "a", "C": "c"}, setup)
    assert environ.items() >= {"A": "a more", "B": "2", "D": "0"}.items()
    assert "C" not in environ


def test_node_zip_is_first_in_pythonpath(recorder: Recorder) -> None:
    job_dir = recorder.directory / "jobs" / "env"
    assert environment_from_node_script(recorder, {})["PYTHONPATH"] == str(
        job_dir / "clusterjob-node.pyz"
    )
    environ = environment_from_node_script(
        recorder, {"PYTHONPATH": "/mine:/yours"}, inherited={"PYTHONPATH": "/inherited"}
    )
    assert environ["PYTHONPATH"] == f"{job_dir / 'clusterjob-node.pyz'}:/mine:/yours"
