"""Events of a job, places of --notify, and arrays that notify as a whole."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import new_folder
from procs import TEST_TIMEOUT, alive, wait_until
from servers import silent, webhook

from clusterjob.core import notifications
from clusterjob.core.notifications import NotifyPlace
from clusterjob.core.options import read_setting
from clusterjob.core.spec import JobSpec
from clusterjob.errors import ClusterJobError, ConfigError, SpecError
from clusterjob.node import notifications as sender
from clusterjob.node.notifications import Event, Notifier, event_of, events_of_array, wanted
from clusterjob.node.program import Program
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import Failure, JobState, Verdict

SECRET = "pa55word"
JOB = {"job_id": "a-1", "name": "a", "cluster": "lab"}


def spec(tmp_path: Path, **fields: Any) -> JobSpec:
    return JobSpec(Program("command", "true"), workdir=tmp_path, **fields)


def verdict(state: JobState, code: int = 1, **fields: Any) -> Verdict:
    return Verdict(state, 0 if state is JobState.SUCCEEDED else code, **fields)


# -- events ----------------------------------------------------------------------------------------


class Noted(Notifier):
    """A notifier that keeps the events which it would send."""

    def __init__(self, on: str, elements: int = 0) -> None:
        settings = {"on": on.split(), "name": "a", "cluster": "lab", "elements": elements}
        data = json.dumps(settings | {"urls": [], "commands": ["true"]})
        super().__init__(data, "a-1", Path("/nowhere"), print_line=print)
        self.events: list[Event] = []

    async def _run(self, event: Event, before: object) -> None:
        self.events.append(event)


def events_of(noted: Noted, report: Callable[[Noted], None]) -> list[Event]:
    async def run() -> list[Event]:
        report(noted)
        await noted.close()
        return noted.events

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("state", "event", "kinds"),
    [
        (JobState.SUCCEEDED, "end", {"end"}),
        (JobState.CANCELLED, "end", {"end"}),
        (JobState.FAILED, "failure", {"end", "failure"}),
        (JobState.LOST, "failure", {"end", "failure"}),
        (JobState.PREEMPTED, "requeue", {"requeue"}),
    ],
)
def test_verdict_is_sent_to_those_who_asked_for_its_kind(
    state: JobState, event: str, kinds: set[str]
) -> None:
    sent = {
        kind: events_of(Noted(kind), lambda noted: noted.ended(verdict(state)))
        for kind in ("start", "end", "failure", "requeue")
    }
    assert {kind for kind, events in sent.items() if events} == kinds
    assert {each["event"] for events in sent.values() for each in events} == {event}


def test_first_restarts_are_sent_to_those_who_asked_for_failures() -> None:
    def restart(noted: Noted) -> None:
        for number in range(1, 1001):
            noted.restarts(number, 1000, "why", failure=None)

    assert events_of(Noted("start end requeue"), restart) == []
    assert len(events_of(Noted("failure"), restart)) == 10


def test_event_of_element_is_sent_for_its_array_whatever_was_asked_for() -> None:
    noted = Noted("failure", elements=3)
    assert events_of(noted, lambda noted: noted.ended(verdict(JobState.SUCCEEDED)))


@given(st.text(), st.text())
def test_text_of_any_failure_is_short_and_harmless(message: str, host: str) -> None:
    failure = Failure(3, 1, node_rank=1, host=host, exit_code=1, signal=None, message=message)
    end = verdict(JobState.FAILED, reason=f"{failure.who}: {message}", failure=failure)
    noted = Noted("end")
    noted._begun -= 7500.0
    [event] = events_of(noted, lambda noted: noted.ended(end))
    lines = event["text"].split("\n")
    assert len(lines) == 3
    assert lines[0] == "a (a-1) on lab: FAILED, exit code 1, after 2:05:00"
    assert lines[-1] == "clusterjob logs a-1"
    assert all(sanitize(line) == line for line in lines)
    assert max(map(len, lines)) <= 500
    assert len(event["host"]) <= 500


def test_place_that_hangs_delays_script_that_cannot_start_its_agent_by_a_timeout(
    tmp_path: Path,
) -> None:
    settings = {"on": ["failure"], "name": "a", "cluster": "lab", "elements": 0}
    settings["commands"] = [f"cat > {tmp_path / 'facts'}"]
    code = (
        "from clusterjob.node import notifications as sender; sender._REFUSED_TIMEOUT = 1\n"
        "sender.refused('7', 'a setup line failed')"
    )
    with silent() as url:
        data = json.dumps(settings | {"urls": [url]})
        environ = {"CLUSTERJOB_NOTIFICATIONS": data, "CLUSTERJOB_JOB_ID": "a-1"}
        begin = time.monotonic()
        subprocess.run([sys.executable, "-c", code], env=os.environ | environ, check=True)
    assert time.monotonic() - begin < 8, "the service has 10 s"
    facts = json.loads((tmp_path / "facts").read_text())
    assert (facts["state"], facts["exit_code"]) == ("FAILED", 7)
    assert facts["reason"].endswith(": a setup line failed")


def test_missing_apprise_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)  # its import fails
    send = functools.partial(sender._notify, f"json://{SECRET}")
    sender._deliver("json://", send, [event_of("end", JOB, "SUCCEEDED", "")], timeout=0)
    assert capfd.readouterr().out == (
        f"{sys.executable} has no apprise: pip install apprise there, or use --notify-cmd\n"
    )


# -- the process that sends ------------------------------------------------------------------------


def send(directory: Path, *urls: str, commands: Sequence[str] = ()) -> list[str]:
    """Send the failure of a job without pauses between the attempts; return what is printed."""
    code = (
        "from clusterjob.node import notifications as sender\n"
        "sender._PAUSES, sender._COMMAND_TIMEOUT = (0.0,) * 4, 1.0\nsender.main()"
    )
    event = event_of("failure", JOB, "FAILED", "rank 0: boom", exit_code=3, rank=0, final=True)
    places = {"urls": urls, "commands": commands, "on": ["failure"], "elements": 0}
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(places | {"job_dir": "", "event": event}),
        env=os.environ | {"KEY": "of the job", "PYTHONPATH": str(Path(__file__).parents[2])},
        cwd=directory,
        capture_output=True,
        text=True,
        check=True,
    )
    return sorted(done.stdout.splitlines())


def test_place_is_tried_four_times_and_reported_without_its_url(tmp_path: Path) -> None:
    """A POST that follows a redirect becomes a GET without the message: none is followed."""
    retried = "echo x >> tries; [ $(wc -l < tries) = 2 ]"
    failing = "echo 'no \x1b[2Jroute' >&2; exit 4"
    with webhook() as refusing, webhook() as busy:
        refusing.codes, busy.codes = [302] * 9, [500, 503]
        said = send(tmp_path, refusing.url, busy.url, commands=(retried, failing))
        assert refusing.requests == ["POST /pa55word"] * 4
        assert busy.requests == ["POST /pa55word"] * 3
        assert busy.states == ["FAILED"]
    assert (tmp_path / "tries").read_text() == "x\nx\n"
    assert said == [
        "--notify-cmd: not sent after 4 attempts: exit code 4: no \\x1b[2Jroute",
        "json://: not sent after 4 attempts: refused, or no answer",
    ]


def test_command_gets_facts_as_variables_and_as_json(tmp_path: Path) -> None:
    assert send(tmp_path, commands=('env -0 > variables; cat > facts; echo "$KEY" > key',)) == []
    facts = json.loads((tmp_path / "facts").read_text())
    assert (facts["event"], facts["state"], facts["exit_code"]) == ("failure", "FAILED", 3)
    pairs = (tmp_path / "variables").read_text().split("\0")
    variables = dict(pair.split("=", 1) for pair in pairs if pair)
    for name in ("EVENT", "STATE", "EXIT_CODE", "JOB_ID", "REASON", "TEXT"):
        assert variables[f"CLUSTERJOB_NOTIFY_{name}"] == str(facts[name.lower()])
    assert (tmp_path / "key").read_text() == "of the job\n"


def test_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    said = send(tmp_path, commands=("yes >&2 & echo $! > child; sleep 1000",))
    assert said == ["--notify-cmd: not sent after 4 attempts: it did not end within 1 s"]
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not alive(child), TEST_TIMEOUT, "the end of the command's child")


# -- places ----------------------------------------------------------------------------------------


@given(st.text(alphabet=st.characters(exclude_categories=["Z", "C"]), min_size=1))
def test_url_appears_in_no_text_and_no_record(secret: str) -> None:
    place = NotifyPlace.parse(f"slack://{secret}/x")
    assert str(place) == "slack://***"
    assert repr(place) == "slack://***"
    assert "slack://***" in repr((place,))
    assert place.urls({}) == [f"slack://{secret}/x"]


@pytest.mark.parametrize(
    "value",
    [
        [""],
        ["@"],
        ["https:/x"],
        [f"hooks.slack.com/{SECRET}"],
        [f"a b://{SECRET}"],
        {"url": f"json://{SECRET}"},
        [{"url": SECRET}],
        3,
        True,
    ],
)
def test_value_that_is_no_place_is_refused_without_showing_it(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        read_setting("notify", value, "clusterjob.toml")
    assert SECRET not in f"{caught.value.message}{caught.value.hint}"


def test_variable_and_file_hold_one_url_per_line(tmp_path: Path) -> None:
    (tmp_path / "urls").write_text("# team\njson://a\n\n  mailto://b \n")
    place = NotifyPlace.parse("@urls").beside(tmp_path)
    assert str(place) == f"@{tmp_path / 'urls'}"
    assert place.urls({}) == ["json://a", "mailto://b"]
    assert NotifyPlace.parse("HOOKS").urls({"HOOKS": "json://a\njson://b"}) == [
        "json://a",
        "json://b",
    ]


@pytest.mark.parametrize("content", [SECRET, "", "# none\n", f"json://a\n{SECRET}\n", "\udcff"])
def test_variable_or_file_without_url_is_refused_without_showing_it(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "urls").write_bytes(content.encode(errors="surrogateescape"))
    for place in (NotifyPlace(f"@{tmp_path / 'urls'}"), NotifyPlace("HOOK")):
        with pytest.raises(SpecError) as caught:
            place.urls({"HOOK": content})
        assert SECRET not in f"{caught.value.message}{caught.value.hint}"


def test_recorded_job_keeps_names_and_needs_its_url_again(tmp_path: Path) -> None:
    places = (NotifyPlace("HOOK"), NotifyPlace(f"json://{SECRET}"))
    job = spec(tmp_path, notify=places, notify_cmd=("true",), notify_on=("end",))
    assert SECRET not in f"{job!r}{job.to_json()}"
    read = JobSpec.from_json(job.to_json())
    assert (read.notify_cmd, read.notify_on) == (("true",), ("end",))
    assert [str(place) for place in read.notify] == ["HOOK", "json://***"]
    with pytest.raises(SpecError, match=r"the job's --notify json://\*\*\* is not recorded"):
        read.private_values({"HOOK": "json://a"}, "lab")


def test_record_of_older_version_has_no_notifications(tmp_path: Path) -> None:
    data = {key: value for key, value in spec(tmp_path).to_json().items() if "notify" not in key}
    read = JobSpec.from_json(data)
    assert (read.notifies, read.notify_on) == (False, ("end", "failure", "requeue"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"notify_on": ("ends",)}, "--notify-on 'ends': unknown event"),
        ({"notify_cmd": ("true",), "launcher": "srun"}, "--launcher srun starts none"),
        ({"notify_cmd": ("a\0b",)}, "contains a NUL byte"),
        ({"notify_cmd": ("true", " ")}, "--notify-cmd is empty"),
        ({"notify_cmd": ("x" * 60_000,)}, "--notify and --notify-cmd have 60"),
    ],
)
def test_invalid_notifications_are_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        spec(tmp_path, **fields).private_values({}, "lab")
    assert message in caught.value.message
    assert caught.value.hint or "NUL" in message


def test_url_that_apprise_cannot_read_is_refused_without_showing_it() -> None:
    with pytest.raises(ClusterJobError) as caught:
        notifications.check_urls([NotifyPlace(f"nowhere://{SECRET}")], {})
    assert caught.value.message == "--notify nowhere://***: apprise cannot read this nowhere:// URL"
    assert SECRET not in caught.value.hint


def test_url_without_apprise_is_refused_or_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)  # its import fails
    places = [NotifyPlace(f"slak://{SECRET}")]
    with pytest.raises(ClusterJobError) as caught:
        notifications.check_urls(places, {}, sys.executable)
    assert caught.value.message.startswith("--notify slak://***: nothing would be sent")
    [note] = notifications.check_urls(places, {}, "/elsewhere/python")
    assert note == "--notify slak://***: not checked, and the job's Python needs apprise"


@pytest.mark.parametrize(
    "url",
    [
        "mailto://me:pw@example.com",
        "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ",
        "https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ",
        "feishu://abcdefghij",
        "lark://abcdefghij",
        "dingtalk://abcdefghij",
        "wecombot://abcdefghij",
        "json://localhost/x",
    ],
)
def test_urls_of_named_services_are_accepted(url: str) -> None:
    assert not notifications.check_urls([NotifyPlace.parse(url)], {}), "no note"


# -- arrays ----------------------------------------------------------------------------------------


def element(index: int, kind: str, state: str, *, final: bool = False) -> Event:
    return event_of(kind, JOB | {"job_id": f"a-1_{index}"}, state, "why", final=final)


def merge(root: Path, event: Event, elements: int = 3) -> list[Event]:
    directory = new_folder(root / "elements" / event["job_id"].partition("_")[2])
    return events_of_array(event, directory, elements)


def ended(root: Path, index: int, state: JobState, elements: int = 3) -> list[Event]:
    kind = {JobState.SUCCEEDED: "end", JobState.FAILED: "failure"}.get(state, "requeue")
    return merge(root, element(index, kind, str(state), final=True), elements)


def test_array_sends_first_failure_and_one_end(tmp_path: Path) -> None:
    start = element(0, "start", "RUNNING")
    assert merge(tmp_path, start) == [start]
    assert merge(tmp_path, element(1, "start", "RUNNING")) == []
    assert merge(tmp_path, element(1, "failure", "RESTARTING")) == []
    assert ended(tmp_path, 0, JobState.SUCCEEDED) == []
    [failure] = ended(tmp_path, 1, JobState.FAILED)
    assert (failure["job_id"], failure["state"], failure["reason"]) == ("a-1_1", "FAILED", "why")
    assert not wanted(failure, ["end"]), "the array has not ended"
    [end] = ended(tmp_path, 2, JobState.FAILED)
    assert (end["event"], end["job_id"], end["state"]) == ("failure", "a-1", "FAILED")
    assert end["reason"] == "3 elements: 2 FAILED, 1 SUCCEEDED"
    assert wanted(end, ["end"])
    assert ended(tmp_path, 2, JobState.FAILED) == [], "an element that runs again"


def test_preempted_element_has_not_ended(tmp_path: Path) -> None:
    assert ended(tmp_path, 0, JobState.SUCCEEDED) == []
    assert [each["event"] for each in ended(tmp_path, 2, JobState.PREEMPTED)] == ["requeue"]
    assert ended(tmp_path, 1, JobState.PREEMPTED) == []
    assert ended(tmp_path, 2, JobState.SUCCEEDED) == []
    [end] = ended(tmp_path, 1, JobState.SUCCEEDED)
    assert (end["event"], end["reason"]) == ("end", "3 elements: 3 SUCCEEDED")


def test_elements_that_end_together_send_one_end(tmp_path: Path) -> None:
    count = 16
    with ThreadPoolExecutor(count) as pool:
        found = pool.map(
            lambda index: ended(tmp_path, index, JobState.SUCCEEDED, elements=count), range(count)
        )
    assert [event["reason"] for events in found for event in events] == [
        "16 elements: 16 SUCCEEDED"
    ]
