"""The README's figures are those of the committed report."""

from __future__ import annotations

from pathlib import Path

from benchmarks.report.engine_figures import speeds
from benchmarks.report.runs import Run

ROOT = Path(__file__).parent.parent
RESULTS = [
    ROOT / "benchmarks" / "results" / folder
    for folder in ("qwen2.5-coder-1.5b-avx512", "qwen2.5-coder-1.5b-amx-engines")
]


def test_its_first_table_is_that_of_the_committed_rows() -> None:
    found = [speeds(Run.read(folder).engines) for folder in RESULTS]
    text = (ROOT / "README.md").read_text()
    table = text.partition("weights by activations")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) >= 4
    for line in table:
        label, group, *shown = (cell.strip().replace("`", "") for cell in line.strip().strip("|").split("|"))
        measured = [[f"{rate:.1f}" for rate in one.get((group, label), {}).values()] or ["", ""] for one in found]
        assert shown == [cell for cells in measured for cell in cells], line


def test_its_pictures_are_of_the_same_rows() -> None:
    for folder in RESULTS:
        assert f"]({(folder / 'headline.png').relative_to(ROOT)})" in (ROOT / "README.md").read_text()
        assert (folder / "headline.png").exists()
