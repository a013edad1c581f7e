"""Claims of help and documentation match the code: choices, states, exit codes, commands."""

from __future__ import annotations

import re
from typing import Any

import docs_commands
import pytest
from test_docs import COMMANDS, PAGES, ROOT, options_of, read, section

from clusterjob.core import trust
from clusterjob.core.options import OPTIONS
from clusterjob.errors import InsideError
from clusterjob.node import verdict
from clusterjob.node.options import LAUNCHERS, START_MODES
from clusterjob.node.verdict import Failure, JobState, Verdict


def help_of(name: str, option: str) -> str:
    return str(next(param.help for param in COMMANDS[name].params if option in param.opts))


@pytest.mark.parametrize("name", ["submit", "run", "render", "doctor"])
def test_help_names_every_choice(name: str) -> None:
    for option, choices in (("--launcher", (*LAUNCHERS, "srun")), ("--start", START_MODES)):
        for choice in choices:
            assert re.search(rf"\b{choice}\b", help_of(name, option)), f"{name} {option}: {choice}"


def test_reference_page_lists_states_exit_codes_and_result_keys_of_code() -> None:
    page = read("reference.md")
    assert set(re.findall(r"^\| ([A-Z]+) \|", section(page, "States"), re.MULTILINE)) == {
        str(state) for state in JobState
    }
    codes = set(re.findall(r"^\| (\d+) \|", section(page, "Exit codes"), re.MULTILINE))
    assert {
        str(code)
        for code in (
            verdict.CANCELLED_EXIT_CODE,
            verdict.TIMEOUT_EXIT_CODE,
            verdict.PREEMPTED_EXIT_CODE,
            0,
            1,
            2,
            130,
            InsideError.exit_code,
        )
    } == codes
    described = section(page, "`result.json`")
    assert set(Verdict.__dataclass_fields__) <= set(re.findall(r"`(\w+)`", described))
    assert set(Failure.__dataclass_fields__) <= set(re.findall(r"`(\w+)`", described))


def test_reference_page_names_settings_that_need_trust() -> None:
    sentence = re.search(
        r"need no trust: all settings but (.*?),\s+and a `cluster`",
        read("reference.md"),
        re.DOTALL,
    )
    assert set(re.findall(r"`(\w+)`", sentence[1])) == set(OPTIONS) - trust.HARMLESS


def shown_commands() -> list[tuple[str, str]]:
    """Return (page, command line) of each clusterjob command in a block or a sentence."""
    found = []
    for page in PAGES:
        if page.name == "CHANGELOG.md":  # shows commands of older versions
            continue
        text = page.read_text(encoding="utf-8")
        lines = re.findall(
            r"^(?:    |\$ )(?:[A-Z_]+=\S+ )*clusterjob ([a-z].*)$", text, re.MULTILINE
        )
        lines += re.findall(r"`clusterjob ([a-z][^`\n]*)`", text)
        found += [
            (str(page.relative_to(ROOT)), line.partition("  #")[0].partition(" | ")[0].strip())
            for line in lines
        ]
    return found


def find_unknown_option(line: str) -> str:
    """Return the first option before the program that the command lacks, or ""."""
    name, *words = re.split(r" -- | -m |\S+\.py\b", line.replace("...", ""))[0].split()
    command: Any = COMMANDS.get(name)
    if command is None or name == "launch":  # its options are those of the node half
        return "" if command else name
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    known = options_of(command) | {"-h", "--help"}
    options = [
        word.partition("=")[0].replace("_", "-") for word in words if re.match("--?[a-z]", word)
    ]
    return next((option for option in options if option not in known), "")


def test_chinese_pages_show_the_commands_and_profiles_of_the_english_ones() -> None:
    assert len(commands_of("README.md")) > 8
    assert commands_of("README.zh-CN.md") == commands_of("README.md")
    english, chinese = read("mlp.md"), read("mlp.zh-CN.md")
    shown = commands_of("docs/mlp.zh-CN.md")
    assert len(shown) > 1
    assert [line for line in shown if line not in english] == []
    blocks = re.findall(r"^```toml\n.*?^```$", english, re.MULTILINE | re.DOTALL)
    assert [block for block in blocks if block not in chinese] == []


def test_commands_in_pages_have_only_known_options() -> None:
    shown = shown_commands()
    assert len(shown) > 60
    assert [
        f"{page}: clusterjob {line}: {unknown_option}"
        for page, line in shown
        if (unknown_option := find_unknown_option(line))
    ] == []
    assert find_unknown_option("run --nodez 2 train.py") == "--nodez"


def test_each_command_in_code_blocks_is_run_by_exactly_one_test() -> None:
    shown = [
        (page, command)
        for page in docs_commands.pages()
        for command in docs_commands.shown_commands((ROOT / page).read_text(encoding="utf-8"))
    ]
    runs = [
        (page, command)
        for session in docs_commands.SESSIONS
        for page in session.pages
        for command in session.commands
    ]
    assert len(shown) > 40
    assert set(shown) - set(runs) == set(), "add a test to tests/e2e/test_docs_commands.py"
    assert set(runs) - set(shown) == set(), "no page shows these any more"
    assert len(runs) == len(set(runs)), "two tests run the same command"


def test_tests_that_run_shown_commands_exist() -> None:
    for session in docs_commands.SESSIONS:
        file, _, name = session.runner.rpartition("::")
        code = (ROOT / (file or docs_commands.RUNNERS)).read_text(encoding="utf-8")
        assert f"\ndef {name}(" in code, session.runner


@pytest.mark.parametrize(("page", "max_lines"), [("README.md", 160), ("docs/architecture.md", 250)])
def test_main_pages_stay_below_line_limit(page: str, max_lines: int) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= max_lines


def commands_of(page: str) -> list[str]:
    """Return the command lines of a page, without comments."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = re.findall(r"^(?:    |\$ )((?:clusterjob|make|pip|git) .*)$", text, re.MULTILINE)
    return [line.partition("  #")[0].strip() for line in lines]


def test_pages_have_at_most_15000_words_beside_generated_tables() -> None:
    generated = re.compile(r"<!-- begin (.+?) -->.*?<!-- end \1 -->", re.DOTALL)
    words = [
        word
        for page in (ROOT / "docs").glob("*.md")
        for word in generated.sub("", page.read_text(encoding="utf-8")).split()
        if re.search(r"\w", word)
    ]
    assert 10_000 < len(words) <= 15_000
