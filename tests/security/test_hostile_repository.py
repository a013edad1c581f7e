"""A hostile clone as working directory: git executes nothing of it, and no secret is sent.

Matching its ignore patterns takes little time.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from commands import command
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launching import executable, new_folder, write_tree

from clusterjob.core import snapshot, uv_project
from clusterjob.core.snapshot import git_revision
from clusterjob.core.snapshot.git_revision import Git
from clusterjob.core.snapshot.ignore_rules import Patterns
from clusterjob.errors import SpecError


def git(root: Path, *args: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@x"]
    return subprocess.run(
        ["git", "-C", root, *identity, *args], capture_output=True, text=True, check=True
    ).stdout


def sent_paths(root: Path, *, include_secrets: bool = False) -> list[str]:
    taken = snapshot.take(root, include_secrets=include_secrets)
    return [entry.path for entry in taken.entries if entry.kind == "file"]


# -- git -------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "clone"
    write_tree(root, **{"a.py": "old\n", "data.bin": "1\n", "sub/b.py": "old\n"})
    git(root, "init", "-q", "-b", "work")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    return root


def plant_commands(root: Path, mark: Path) -> None:
    """Put a command into each place where git's configuration, hooks and attributes allow one."""
    script = executable(root / ".git" / "evil", f"#!/bin/sh\necho \"$0 $*\" >> '{mark}'\ncat\n")
    for key in (
        "diff.external", "filter.evil.clean", "filter.evil.smudge", "filter.evil.process",
        "diff.evil.command", "diff.evil.textconv", "core.fsmonitor", "core.pager",
        "core.sshCommand", "core.editor", "remote.origin.uploadpack", "gpg.program",
    ):  # fmt: skip
        git(root, "config", key, str(script))
    git(root, "config", "filter.evil.required", "true")
    git(root, "config", "core.hooksPath", str(root / ".git" / "hooks"))
    for hook in (
        "post-index-change",
        "pre-commit",
        "post-checkout",
        "reference-transaction",
        "fsmonitor-watchman",
    ):
        write_tree(root / ".git" / "hooks", **{hook: script.read_text()})
        (root / ".git" / "hooks" / hook).chmod(0o755)
    write_tree(
        root,
        **{
            ".git/info/attributes": "* filter=evil diff=evil\n",
            ".gitattributes": "* filter=evil diff=evil\n",
        },
    )


def test_git_executes_no_command_configured_by_a_clone(repository: Path, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    module = repository / "module"
    write_tree(module, inner="old\n")
    git(module, "init", "-q")
    git(module, "add", ".")
    git(module, "commit", "-qm", "inner")
    git(repository, "add", "module")
    git(repository, "commit", "-qm", "second")
    write_tree(module, inner="new\n")
    for root in (repository, module):
        plant_commands(root, mark)
    write_tree(repository, **{"a.py": "new\n", "new.py": ""})
    state, diff = Git(repository).state()
    assert b"-old\n+new\n" in diff
    assert {"a.py", "new.py"} <= set(state["changed"])
    assert not mark.exists(), mark.read_text()
    sent_paths(repository)
    assert not mark.exists(), mark.read_text()


def test_git_runs_no_transport_command_for_missing_objects_of_a_clone(
    repository: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "executed"
    plant_commands(repository, mark)
    git(repository, "config", "remote.origin.url", f"ext::sh -c 'touch {mark}'")
    git(repository, "config", "remote.origin.promisor", "true")
    git(repository, "config", "protocol.ext.allow", "always")
    git(repository, "config", "core.repositoryformatversion", "1")
    git(repository, "config", "extensions.partialClone", "origin")
    for path in (repository / ".git" / "objects").glob("??/*"):
        if (
            subprocess.run(
                ["git", "-C", repository, "cat-file", "-t", path.parent.name + path.name],
                capture_output=True,
                check=True,
            ).stdout
            == b"blob\n"
        ):
            path.unlink()
    mark.unlink(missing_ok=True)
    write_tree(repository, **{"a.py": "new\n"})
    assert Git(repository).state()[0] is not None
    assert not mark.exists()


def test_git_state_equals_output_of_git_for_ordinary_repository(repository: Path) -> None:
    write_tree(
        repository, **{"a.py": "new\n", "sub/c.py": "", ".gitignore": "*.log\n", "x.log": ""}
    )
    (repository / "data.bin").unlink()
    state, diff = Git(repository).state()
    assert (state["revision"], state["branch"]) == (
        git(repository, "rev-parse", "HEAD").strip(),
        "work",
    )
    assert diff.decode() == git(repository, "diff", "HEAD", "--binary", "--", ".")
    assert state["changed"] == [
        line[3:] for line in git(repository, "status", "--porcelain", "--", ".").splitlines()
    ]
    tree = repository.parent / "tree"
    git(repository, "worktree", "add", "-q", str(tree), "-b", "other")
    write_tree(tree, **{"sub/b.py": "new\n"})
    part, diff = Git(tree / "sub").state()
    assert (part["branch"], part["changed"]) == ("other", ["sub/b.py"])
    assert b"+new" in diff


@pytest.mark.skipif(os.geteuid() != 0, reason="a second user needs root")
def test_git_state_of_repository_of_another_user_is_none(repository: Path) -> None:
    for path in (repository, repository / ".git"):
        os.chown(path, 65534, 65534)
    assert Git(repository).state() == (None, b"")


@pytest.mark.parametrize("name", [".git/config", ".git/HEAD"])
def test_git_is_asked_once_if_a_file_of_the_repository_blocks(
    repository: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(git_revision, "_TIMEOUT", 1.0)
    if name == ".git/config":
        git(repository, "config", "include.path", "pipe")
        os.mkfifo(repository / ".git" / "pipe")
    else:
        (repository / name).unlink()
        os.mkfifo(repository / name)
    started: list[Sequence[str]] = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda argv, **more: started.append(argv) or popen(argv, **more)
    )
    asked = Git(repository)
    assert [entry.path for entry in snapshot.take(repository, git=asked).entries if entry.size]
    assert asked.state() == (None, b"")
    assert len(started) == 1
    [message] = caplog.messages
    assert "did not end within 1 s" in message


# -- ignore patterns -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    [
        "*a" * 25,
        "*a*" * 25 + "b",
        "/".join(["**", "a*"] * 40),
        "**/" * 100 + "*a" * 20,
        "[" * 2000,
        "*" * 4000,
    ],
)
def test_expensive_ignore_pattern_is_matched_within_5_seconds(tmp_path: Path, pattern: str) -> None:
    deep = "/".join(["a" * 20] * 12)
    write_tree(
        tmp_path, **{".gitignore": f"{pattern}\n", "a" * 200 + "b": "", f"{deep}/{'a' * 200}c": ""}
    )
    begin = time.monotonic()
    sent_paths(tmp_path)
    assert (
        time.monotonic() - begin < 5
    )  # takes milliseconds; in an older version `*a` 25 times took hours


TOKENS = [
    "a",
    "b",
    "*",
    "**",
    "?",
    "[ab]",
    "[!a]",
    "[^b]",
    "[a-c]",
    "[]a]",
    "[[:alpha:]]",
    "/",
    "d",
    "e",
    "\\",
    "!",
    "#",
    "é",
    "[",
    "]",
    "-",
    " ",
]
NAMES = [
    "a",
    "b",
    "ab",
    "ba",
    "d/a",
    "d/b",
    "d/ab",
    "d/e/a",
    "d/e/ab",
    "a-b",
    "[a]",
    "é",
    "!a",
    "#a",
    "d/a b",
    "e/d/ab",
    "\\a",
]


@given(
    lines=st.lists(
        st.lists(st.sampled_from(TOKENS), min_size=1, max_size=5).map("".join), max_size=3
    )
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ignore_patterns_match_as_git_matches_them(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    root = tmp_path_factory.mktemp("repo")
    git(root, "init", "-q")
    write_tree(root, **dict.fromkeys(NAMES, ""), **{".gitignore": "\n".join(lines) + "\n"})
    wanted = git(
        root,
        "-c",
        "core.excludesFile=/dev/null",
        "ls-files",
        "-z",
        "--others",
        "--exclude-standard",
    ).split("\0")
    # git removes the text before the first wildcard, so it treats `x**/a` as `x` followed by
    # `**/a`. Its documentation has no such rule.
    if not any("**" in line.strip("*/") for line in lines):
        assert sorted(sent_paths(root)) == sorted(name for name in wanted if name)


@pytest.mark.parametrize(("lines", "what"), [(600_000, "1.0 MB"), (10_001, "10,000 lines")])
def test_too_large_gitignore_is_refused_by_name(tmp_path: Path, lines: int, what: str) -> None:
    write_tree(tmp_path, **{".gitignore": "x\n" * lines})
    with pytest.raises(snapshot.SubmitError, match=rf"\.gitignore holds more than {what} of"):
        sent_paths(tmp_path)


# -- secrets ---------------------------------------------------------------------------------------

SECRETS = {
    ".env": "TOKEN=1", "sub/.env.local": "x", ".ssh/id_rsa": "x", "keys/id_ed25519": "x",
    "tls.pem": "-----BEGIN PRIVATE KEY-----", "odd.key": "x", ".netrc": "x",
    ".aws/credentials": "x", ".docker/config.json": "x", "deep/secrets.yaml": "x", "prod.env": "x",
    "ID_RSA": "x", "Server.PEM": "x", "kubeconfig": "x", ".cache/huggingface/token": "x",
    "main.tfstate": "x", "application_default_credentials.json": "x", "my-serviceaccount.json": "x",
    ".s3cfg": "x", "rclone.conf": "x", "deploy_key": "-----BEGIN OPENSSH PRIVATE KEY-----",
    "id_ed25519_github": "-----BEGIN OPENSSH PRIVATE KEY-----",
}  # fmt: skip
ORDINARY = {
    "train.py": "", ".env.example": "", "id_rsa.pub": "ssh-rsa AAAA", "id_map.py": "",
    "huggingface/token.py": "", "environment.yml": "", "ca.pem": "-----BEGIN CERTIFICATE-----\n",
    "config.json": "",
}  # fmt: skip


def test_likely_secrets_are_left_out_and_named_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tree(tmp_path, **SECRETS, **ORDINARY)
    assert sent_paths(tmp_path) == sorted(ORDINARY)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "clusterjob: not sent, as it looks like a secret: .aws/, .cache/huggingface/token, "
        ".docker/config.json, .env, "
    )
    assert line.endswith("(--include-secrets sends it)")
    caplog.clear()
    assert sorted(sent_paths(tmp_path, include_secrets=True)) == sorted({**SECRETS, **ORDINARY})
    assert not caplog.records


def test_version_control_directories_are_left_out_at_every_depth(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        **{
            "a.py": "",
            ".git/config": "x",
            "sub/.git/config": "token",
            "sub/deep/.hg/hgrc": "",
            "m/.git": "x",
            "sub/.svn/entries": "",
        },
    )
    assert sent_paths(tmp_path, include_secrets=True) == ["a.py"]


@pytest.mark.parametrize("named", [True, False])
def test_ignore_patterns_of_user_git_configuration_are_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    write_tree(
        home,
        **{
            ".config/git/ignore": "*.own\n",
            ".mine": "*.own\n",
            ".gitconfig": "[core]\n\texcludesFile = ~/.mine\n" if named else "",
        },
    )
    (home / ".config/git/ignore" if named else home / ".mine").unlink()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME")
    write_tree(work, **{"a.py": "", "x.own": "", "sub/y.own": "", "sub/.gitignore": "!y.own\n"})
    for _ in range(2):
        assert sent_paths(work) == ["a.py", "sub/.gitignore", "sub/y.own"]
        git(work, "init", "-q")


def test_dry_run_lists_sent_files_with_sizes_and_left_out_secrets(tmp_path: Path) -> None:
    write_tree(
        tmp_path, **{"train.py": "print()\n", "sub/data.csv": "x" * 2000, ".env": "TOKEN=hush"}
    )

    def dry_run(*words: str) -> str:
        options = ("--dry-run", "--cluster", "ssh", "--hosts", "gpu1", *words)
        done = command(tmp_path, "submit", *options, "train.py")
        assert "hush" not in done.stdout + done.stderr
        return done.stdout

    text = dry_run()
    assert f"### code: 2 files, 2.0 KB, of {tmp_path}\n" in text
    assert "        2000 sub/data.csv\n" in text
    assert "\nnot sent, as it looks like a secret: .env (--include-secrets sends it)\n" in text
    assert "          10 .env\n" in dry_run("--include-secrets")
    assert "### code" not in dry_run("--no-sync")
    code = json.loads(dry_run("--json"))["code"]
    assert (code["bytes"], [one["path"] for one in code["files"]], code["left_out"]) == (
        2008,
        ["sub/data.csv", "train.py"],
        [".env"],
    )


def test_ignore_patterns_match_bytes_of_a_name() -> None:
    assert Patterns([b"?"]).verdict("é", is_directory=False) is None
    assert Patterns([b"??"]).verdict("é", is_directory=False) is True
    assert Patterns([b"\xff*"]).verdict(os.fsdecode(b"\xffx"), is_directory=False) is True


UV_LOCK = """
version = 1
[[package]]
name = "evil"
source = { path = "%s" }
"""


@pytest.mark.parametrize(
    ("name", "link", "why"),
    [
        ("uv.toml", "../secret", "leads out of"),
        ("evil.whl", "../secret", "leads out of"),
        ("wheels/evil.whl", "", "leads out of"),  # the directory is a link
        ("evil.whl", ".env", "looks like a secret"),
        (".env", "", "looks like a secret"),
        (".ssh/evil.whl", "", "looks like a secret"),
    ],
)
def test_uv_sends_neither_files_behind_links_nor_secrets(
    tmp_path: Path, name: str, link: str, why: str
) -> None:
    project = new_folder(tmp_path / "project")
    write_tree(tmp_path, **{"secret": "of mine", "evil.whl": "of mine"})
    (project / "wheels").symlink_to(tmp_path)
    (project / ".ssh").mkdir()
    for path in (project / ".env", project / ".ssh" / "evil.whl"):
        path.write_text("of mine")
    write_tree(
        project, **{"pyproject.toml": "[project]\nname = 'evil'\n", "uv.lock": UV_LOCK % name}
    )
    if link:
        (project / name).symlink_to(link)
    with pytest.raises(SpecError, match=why):
        uv_project.read(project, "python3")
