"""A working directory that is a hostile clone: git executes nothing of it, patterns cost no time,
and secrets are not sent.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from procs import PATIENCE

from clusterjob.core import snapshot
from clusterjob.core.snapshot import git_revision
from clusterjob.core.snapshot.ignore_rules import Patterns


def git(root: Path, *words: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@x"]
    return subprocess.run(
        ["git", "-C", root, *identity, *words], capture_output=True, text=True, check=True
    ).stdout


def fill(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def paths(root: Path, *, include_secrets: bool = False) -> list[str]:
    taken = snapshot.take(root, include_secrets=include_secrets)
    return [entry.path for entry in taken.entries if entry.kind == "file"]


# -- git ------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "clone"
    root.mkdir()
    git(root, "init", "-q", "-b", "work")
    fill(root, **{"a.py": "old\n", "data.bin": "1\n", "sub/b.py": "old\n"})
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    return root


def arm(root: Path, mark: Path) -> None:
    """Have a repository execute a command wherever git's configuration and attributes can name one."""
    script = root / ".git" / "evil"
    script.write_text(f"#!/bin/sh\necho \"$0 $*\" >> '{mark}'\ncat\n")
    script.chmod(0o755)
    for key in ("diff.external", "filter.evil.clean", "filter.evil.smudge", "filter.evil.process", "diff.evil.command",
                "diff.evil.textconv", "core.fsmonitor", "core.pager", "core.sshCommand", "core.editor", "remote.origin.uploadpack",
                "gpg.program"):  # fmt: skip
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
        (root / ".git" / "hooks").mkdir(exist_ok=True)
        (root / ".git" / "hooks" / hook).write_text(script.read_text())
        (root / ".git" / "hooks" / hook).chmod(0o755)
    (root / ".git" / "info" / "attributes").write_text("* filter=evil diff=evil\n")
    (root / ".gitattributes").write_text("* filter=evil diff=evil\n")


def test_git_executes_nothing_that_a_clone_names(repository: Path, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    module = repository / "module"
    module.mkdir()
    git(module, "init", "-q")
    fill(module, inner="old\n")
    git(module, "add", ".")
    git(module, "commit", "-qm", "inner")
    git(repository, "add", "module")
    git(repository, "commit", "-qm", "second")
    fill(module, inner="new\n")
    for root in (repository, module):
        arm(root, mark)
    fill(repository, **{"a.py": "new\n", "new.py": ""})
    state = git_revision.git_state(repository)
    assert state is not None
    assert b"-old\n+new\n" in state["diff"]
    assert {"a.py", "new.py"} <= set(state["changed"])
    assert not mark.exists(), mark.read_text()
    paths(repository)
    assert not mark.exists(), mark.read_text()


def test_a_clone_whose_objects_are_to_be_fetched_by_a_command(
    repository: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "executed"
    arm(repository, mark)
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
    fill(repository, **{"a.py": "new\n"})
    assert git_revision.git_state(repository) is not None
    assert not mark.exists()


def test_what_git_says_is_what_it_says_of_an_ordinary_repository(repository: Path) -> None:
    fill(repository, **{"a.py": "new\n", "sub/c.py": "", ".gitignore": "*.log\n", "x.log": ""})
    (repository / "data.bin").unlink()
    state = git_revision.git_state(repository)
    assert state is not None
    assert (state["revision"], state["branch"]) == (
        git(repository, "rev-parse", "HEAD").strip(),
        "work",
    )
    assert state["diff"].decode() == git(repository, "diff", "HEAD", "--binary", "--", ".")
    assert state["changed"] == [
        line[3:] for line in git(repository, "status", "--porcelain", "--", ".").splitlines()
    ]
    tree = repository.parent / "tree"
    git(repository, "worktree", "add", "-q", str(tree), "-b", "other")
    fill(tree, **{"sub/b.py": "new\n"})
    part = git_revision.git_state(tree / "sub")
    assert part is not None
    assert (part["branch"], part["changed"]) == ("other", ["sub/b.py"])
    assert b"+new" in part["diff"]


@pytest.mark.skipif(os.geteuid() != 0, reason="a second user needs root")
def test_a_repository_of_another_user_is_left_alone(repository: Path) -> None:
    for path in (repository, repository / ".git"):
        os.chown(path, 65534, 65534)
    assert git_revision.git_state(repository) is None


# -- patterns ---------------------------------------------------------------------------------------------------------------------


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
def test_no_pattern_takes_long(tmp_path: Path, pattern: str) -> None:
    deep = "/".join(["a" * 20] * 12)
    fill(
        tmp_path, **{".gitignore": f"{pattern}\n", "a" * 200 + "b": "", f"{deep}/{'a' * 200}c": ""}
    )
    begin = time.monotonic()
    paths(tmp_path)
    assert time.monotonic() - begin < 5  # takes milliseconds; `*a` 25 times took hours


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
def test_patterns_are_those_of_git(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    root = tmp_path_factory.mktemp("repo")
    git(root, "init", "-q")
    fill(root, **dict.fromkeys(NAMES, ""), **{".gitignore": "\n".join(lines) + "\n"})
    wanted = git(
        root,
        "-c",
        "core.excludesFile=/dev/null",
        "ls-files",
        "-z",
        "--others",
        "--exclude-standard",
    ).split("\0")
    # git strips what stands before the first wildcard, and so takes `x**/a` for `x` followed by
    # `**/a`: no rule says so.
    if not any("**" in line.strip("*/") for line in lines):
        assert sorted(paths(root)) == sorted(name for name in wanted if name)


def test_a_file_of_patterns_that_is_too_large_is_named(tmp_path: Path) -> None:
    fill(tmp_path, **{".gitignore": "x\n" * 600_000})
    with pytest.raises(
        snapshot.SubmitError, match=r"\.gitignore holds more than 1\.0 MB of patterns"
    ):
        paths(tmp_path)


def test_a_file_of_too_many_patterns_is_named(tmp_path: Path) -> None:
    fill(tmp_path, **{".gitignore": "x\n" * 10_001})
    with pytest.raises(
        snapshot.SubmitError, match=r"\.gitignore holds more than 10,000 lines of patterns"
    ):
        paths(tmp_path)


# -- secrets ----------------------------------------------------------------------------------------------------------------------

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


def test_what_looks_like_a_secret_is_left_out_and_named_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path, **SECRETS, **ORDINARY)
    assert paths(tmp_path) == sorted(ORDINARY)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "clusterjob: not sent, as it looks like a secret: .aws/, .cache/huggingface/token, .docker/config.json, .env, "
    )
    assert line.endswith("(--include-secrets sends it)")
    caplog.clear()
    assert sorted(paths(tmp_path, include_secrets=True)) == sorted({**SECRETS, **ORDINARY})
    assert not caplog.records


def test_git_directories_are_left_out_at_every_depth(tmp_path: Path) -> None:
    fill(tmp_path, **{"a.py": "", ".git/config": "x", "sub/.git/config": "token", "sub/deep/.hg/hgrc": "", "m/.git": "x",
                      "sub/.svn/entries": ""})  # fmt: skip
    assert paths(tmp_path, include_secrets=True) == ["a.py"]


@pytest.mark.parametrize("named", [True, False])
def test_the_users_own_patterns_for_git_are_heeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    fill(
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
    fill(work, **{"a.py": "", "x.own": "", "sub/y.own": "", "sub/.gitignore": "!y.own\n"})
    for _ in range(2):
        assert paths(work) == ["a.py", "sub/.gitignore", "sub/y.own"]
        git(work, "init", "-q")


def test_a_dry_run_lists_the_files_their_size_and_what_is_left_out(tmp_path: Path) -> None:
    fill(tmp_path, **{"train.py": "print()\n", "sub/data.csv": "x" * 2000, ".env": "TOKEN=hush"})
    argv = [
        sys.executable,
        "-m",
        "clusterjob",
        "submit",
        "--dry-run",
        "--cluster",
        "ssh",
        "--hosts",
        "gpu1",
    ]

    def shown(*words: str) -> str:
        done = subprocess.run(
            [*argv, *words, "train.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "hush" not in done.stdout + done.stderr
        return done.stdout

    text = shown()
    assert f"### code: 2 files, 2.0 KB, of {tmp_path}\n" in text
    assert "        2000 sub/data.csv\n" in text
    assert "\nnot sent, as it looks like a secret: .env (--include-secrets sends it)\n" in text
    assert "          10 .env\n" in shown("--include-secrets")
    assert "### code" not in shown("--no-sync")
    code = json.loads(shown("--json"))["code"]
    assert (code["bytes"], [one["path"] for one in code["files"]], code["left_out"]) == (
        2008,
        ["sub/data.csv", "train.py"],
        [".env"],
    )


def test_patterns_of_bytes_are_bytes() -> None:
    assert Patterns([b"?"]).verdict("é", is_directory=False) is None
    assert Patterns([b"??"]).verdict("é", is_directory=False) is True
    assert Patterns([b"\xff*"]).verdict(os.fsdecode(b"\xffx"), is_directory=False) is True
