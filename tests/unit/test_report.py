"""The report of jobs whose files are written here: content, order, limits, damaged files."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from report_jobs import HOSTILE, WrittenJob, page_of

from clusterjob.backends.base import Status
from clusterjob.backends.shared import ended
from clusterjob.core.records import Record, Records
from clusterjob.insight.report import page, values
from clusterjob.insight.report.gather import gather
from clusterjob.insight.report.make import make, stacks_of
from clusterjob.node.logs.job_dir import EVENTS, METRICS, PHASES
from clusterjob.node.logs.log_files import node_directory
from clusterjob.node.verdict import Failure, FailureKind, JobState, Verdict


class Outline(HTMLParser):
    """Collect the tags and the shown text of a page; check that its elements are nested."""

    VOID = ("meta", "input", "br", "link", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data


def report_of(record: Record, status: Status | None = None) -> str:
    if status is None:
        assert record.verdict is not None
        status = ended(record.verdict)
    data = gather(record, status, stacks_of(record))
    return page.render(lambda detail: values.of_job(data, detail))


def sections(text: str) -> list[str]:
    return re.findall(r'<section id="([a-z]+)"', text)


def test_report_shows_verdict_first_and_all_sections(tmp_path: Path) -> None:
    text = page_of(WrittenJob(tmp_path, nodes=2, per_node=2, restarts=1))
    assert sections(text) == [
        "verdict", "timeline", "metrics", "waits", "stacks", "output", "environment",
        "code",
    ]  # fmt: skip
    shown = Outline(text).text
    for wanted in (
        "FAILED after 1 restart",
        "rank 1 (node 0, local rank 1, host gpu0): ValueError: loss is nan",
        "3 ranks failed as a consequence: 0, 2-3",
        "GPU-hours",
        "rank 1 failed ✕",
        "the others wait 0.27 s of each 0.5 s step for it",
        "rank 0: 60 %",
        "rank 1: 6 %",
        "is in decode (train.py:40)",
        "a hang",
        "SLURM_NNODES",
        "torch",
        "Revision 0123456789abcdef0123456789abcdef01234567",
        "+++ b/train.py",
        "exec python",
        "WANDB_API_KEY",
    ):
        assert wanted in shown, wanted
    for phase in ("setup", "import", "rendezvous", "init", "running", "stop"):
        assert f'class="p-{phase}" stroke-width="18"' in text, phase


def test_report_shows_table_of_preflight_and_survives_forged_one(tmp_path: Path) -> None:
    table = {
        "columns": [["all-reduce", "GB/s", 3.9]],
        "rows": [["gpu0", [1.0]], [f"gpu1 {HOSTILE}", [0.31]]],
        "hosts": 2,
    }
    event = {
        "event": "preflight",
        "monotonic": 5.0,
        "slow": [f"host gpu1: all-reduce 0.31 of the median {HOSTILE}"],
        "findings": ["torch is not the same"],
        "table": table,
    }
    record = WrittenJob(tmp_path).write()
    path = record.job_dir / EVENTS
    before = path.read_text()
    path.write_text(before + json.dumps(event) + "\n")
    text = report_of(record)
    assert sections(text)[:2] == ["verdict", "preflight"]
    for part in (
        '<td class="num slow">0.31 ✕</td>',
        '<td class="num">1.00</td>',
        "is not the same",
    ):
        assert part in text
    assert "<script>alert" not in text
    for wrong in ({"rows": [["gpu0", ["x"]]]}, {"columns": 7}, {"hosts": -1}):
        path.write_text(before + json.dumps(event | {"table": table | wrong}) + "\n")
        assert "preflight" not in sections(report_of(record))


def test_report_loads_nothing_and_allows_only_its_own_style_and_script(tmp_path: Path) -> None:
    tags = Outline(page_of(WrittenJob(tmp_path))).tags
    assert not {"link", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in tags}
    names = {name for _, attributes in tags for name in attributes}
    assert not {"style", "src", "srcset", "onclick", "onload"} & names
    assert all((attributes.get("href") or "#").startswith("#") for _, attributes in tags)
    [policy] = [
        attributes["content"] or ""
        for _, attributes in tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def test_hostile_text_is_escaped_and_has_no_control_characters(tmp_path: Path) -> None:
    record = WrittenJob(tmp_path, restarts=1).write()
    assert record.verdict.failure is not None
    failure = replace(record.verdict.failure, host=HOSTILE)
    text = report_of(record, ended(replace(record.verdict, failure=failure)))
    assert text.count("<script>") == 1  # the page's own
    assert "alert(1)" in text
    assert not set(re.findall(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2066]", text))


def test_report_of_running_job_is_a_snapshot(tmp_path: Path) -> None:
    text = page_of(WrittenJob(tmp_path, failed=None, ended=False))
    assert "The job has not ended: this page shows it at" in text
    assert "▶ RUNNING" in text
    # The last phase lasts until now: its line ends near the right margin.
    [running] = re.findall(
        r'class="p-running" stroke-width="18" d="M([\d.]+) [\d.]+h([\d.]+)', text
    )
    assert float(running[0]) + float(running[1]) > 950


def test_report_of_older_version_shows_what_it_recorded(tmp_path: Path) -> None:
    record = replace(WrittenJob(tmp_path).write(), code=None, spec={})
    for path in (record.job_dir / "logs").glob("node*/*"):
        if path.suffix not in (".out", ".err"):
            path.unlink()
    text = report_of(record)
    assert sections(text) == ["verdict", "timeline", "output", "code"]
    for missing in ("phases are", "metrics are"):
        assert f"No {missing} recorded" in text
    assert "The record has no git revision." in text
    (record.job_dir / EVENTS).unlink()
    assert sections(report_of(record)) == ["verdict", "output", "code"]


def test_report_without_job_directory_shows_the_record(tmp_path: Path) -> None:
    record = replace(WrittenJob(tmp_path).write(), job_dir=tmp_path / "removed")
    text = report_of(record)
    assert "does not exist any more" in text
    assert "loss is nan" in text


def test_node_without_workers_has_a_row(tmp_path: Path) -> None:
    record = WrittenJob(tmp_path, failed=None).write()
    path = node_directory(record.job_dir, 1) / PHASES
    path.write_text("".join(f"{line}\n" for line in path.read_text().splitlines()[:3]))
    text = report_of(record)
    assert "node 1</text>" in text
    assert "Node 1 saw no event together with node 0" in text


def test_gpu_errors_are_named(tmp_path: Path) -> None:
    record = WrittenJob(tmp_path, nodes=2, per_node=2).write()
    path = node_directory(record.job_dir, 1) / METRICS
    *lines, last = path.read_text().splitlines()
    sample = json.loads(last)
    sample[12][1][6:8] = [3, 79]
    path.write_text("\n".join([*lines, json.dumps(sample)]) + "\n")
    wanted = "GPU 1 of node 1 reported XID error 79 and 3 uncorrected ECC errors"
    assert wanted in report_of(record)


def test_lost_node_is_marked_but_none_for_a_hang_of_all_ranks(tmp_path: Path) -> None:
    record = WrittenJob(tmp_path).write()
    failure = Failure.of_node(1, "gpu1", message="its agent is lost")
    verdict = Verdict(JobState.FAILED, 1, reason="node 1 (host gpu1): lost", failure=failure)
    text = report_of(record, ended(verdict))
    assert "node 1, which failed" in text
    assert '<tr class="failed"><th scope="row">1 ✕</th>' in text
    hang = replace(failure, kind=FailureKind.HANG)
    assert "which failed" not in report_of(record, ended(replace(verdict, failure=hang)))


def test_report_of_pending_job_says_why_it_waits(tmp_path: Path) -> None:
    record = replace(WrittenJob(tmp_path).write(), end=None, job_dir=tmp_path)
    text = report_of(record, Status(JobState.PENDING, reason="Resources"))
    assert "▶ PENDING" in text
    assert '<p class="reason">Resources</p>' in text


def test_large_texts_keep_the_page_small(tmp_path: Path) -> None:
    record = WrittenJob(tmp_path, nodes=2, per_node=128, gpus=False).write()
    (record.job_dir / "code.diff").write_text("+ added line\n" * 300_000)
    for path in (record.job_dir / "logs").glob("node*/rank*.out"):
        lines = (f"{path.name} {line} {HOSTILE * 40}\n" for line in range(30))
        path.write_text("".join(lines))
    text = report_of(record)
    assert len(text.encode()) <= page.MAX_BYTES
    assert "more bytes: see" in text
    assert text.count("<details><summary>rank ") > 200


# -- arrays ----------------------------------------------------------------------------------------


def test_report_of_array_has_a_row_for_each_element(tmp_path: Path) -> None:
    record = Record(
        "sweep-abc234", "sweep", cluster="gpu-cluster", backend="slurm", nodes=1,
        job_dir=tmp_path / "sweep-abc234", submitted_at="2026-11-24T10:00:00.000Z",
        spec={"sweep": ["lr=1,2,4"]}, array={"indices": [0, 1, 2], "pieces": [0]},
    )  # fmt: skip
    records = Records()
    records.save(record)
    for index, (state, code, reason) in enumerate(
        [(JobState.SUCCEEDED, 0, ""), (JobState.FAILED, 3, HOSTILE), (JobState.SUCCEEDED, 0, "")]
    ):
        begin, end = "2026-11-24T10:00:00.000Z", "2026-11-24T10:05:00.000Z"
        verdict = Verdict(state, code, reason=reason, started_at=begin, ended_at=end)
        records.save(replace(record.element(index), end=verdict.to_json()))
    text = make(record)
    Outline(text)
    assert "Array of 3 elements: 1 FAILED, 2 SUCCEEDED" in text
    assert re.findall(r'<th scope="row">(sweep-\w+)</th><td>([^<]*)</td>', text) == [
        ("sweep-abc234_1", "lr=2"), ("sweep-abc234_0", "lr=1"), ("sweep-abc234_2", "lr=4"),
    ]  # fmt: skip
    assert "5m 00s" in text
    assert text.count("<script>") == 1
