"""The faults that `make mutants` plants: a line that has changed since would be planted nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mutmut")
from tests.mutants import FAULTS, ROOT, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_line_of_a_planted_fault_stands_once_in_its_file(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text().count(fault.right) == 1
    assert Path(ROOT, fault.tests.partition("::")[0]).is_file()
