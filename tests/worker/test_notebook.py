"""A notebook that runs jobs: `await`, results and the HTML of a job, executed by nbclient."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launching import ROOT

CELLS = (
    (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import asyncio, clusterjob\n"
        "def double(x):\n    return 2 * x\n"
    ),
    (
        "group = clusterjob.map(double, [1, 2], cluster='local')\n"
        "values = await asyncio.gather(*group)\nvalues"
    ),
    "job = group[0]\njob.result(), await job, await group",
    "job",
    "group",
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of zmq and nbformat
def test_notebook_awaits_jobs_and_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": sys.executable}
    nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": tmp_path}}
    ).execute()
    results = [cell.outputs[-1]["data"] for cell in notebook.cells[1:]]
    assert results[0]["text/plain"] == "[2, 4]"
    assert results[1]["text/plain"] == "(2, 2, [2, 4])"
    html = results[2]["text/html"]
    assert ">SUCCEEDED<" in html
    assert results[3]["text/html"].count(">SUCCEEDED<") == 2
