"""`make mutants`: do the tests see faults? Judges what mutmut has tried, and plants some faults of its own.

mutmut plants thousands of small faults (an operator, a constant, an argument) in the modules that pyproject.toml names,
one at a time, and runs the tests of the function. What no test sees must stand in survivors.yaml, with the reason why
it is no fault. The faults planted here are larger than what mutmut thinks of; each of them once went unseen.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import yaml
from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.utils.file_utils import walk_mutatable_files

ROOT = Path(__file__).parents[1]
LEAST = 0.9  # of a module's mutants must die
_SURVIVED = {0, 33, None}  # tests passed, no test, not tried
COPIED = ("engine", "drafters", "retrieval_index", "benchmarks", "configs", "tests", "pyproject.toml")


@dataclass(frozen=True)
class Fault:
    """`right` in `file` becomes `wrong`, and one of `tests` must fail."""

    name: str
    file: str
    right: str
    wrong: str
    tests: str


FAULTS = (
    Fault(
        "the first nodes are verified instead of the best",
        "engine/round.py",
        "best = order[: costs",
        "best = np.sort(order)[: costs",
        "tests/engine/test_verifier.py",
    ),
    Fault(
        "a tree may reach beyond the context",
        "engine/drafter_line.py",
        "fits = len(request.text) + int(tree.depths.max()) <= self.target.context",
        "fits = True",
        "tests/engine/test_verifier.py",
    ),
    Fault(
        "successors are told of the first nodes instead of those verified",
        "engine/conclusion.py",
        "ranked[round_.kept] =",
        "ranked[: len(round_.kept)] =",
        "tests/engine/test_verifier.py",
    ),
    Fault(
        "a verdict names nodes of the cut tree",
        "engine/conclusion.py",
        "round_.kept[path].tolist()",
        "path",
        "tests/engine/test_verifier.py",
    ),
    Fault(
        "the verifier ignores Cancel",
        "engine/verifier.py",
        "                    self._forget(request)\n            else:",
        "                    pass\n            else:",
        "tests/engine/test_verifier.py",
    ),
    Fault(
        "the front end never sends Cancel",
        "engine/supervisor.py",
        "self.hub.send(flight.verifier, Cancel(request=flight.number))",
        "pass",
        "tests/engine/test_api.py::test_leaving_the_block_of_a_stream_ends_its_request_in_the_verifier",
    ),
    Fault(
        "a request that ends every verifier is handed on for ever",
        "engine/supervisor.py",
        "if self._barren >= _BARREN:",
        "if False:",
        "tests/faults/test_batching.py::"
        "test_a_request_that_ends_every_verifier_is_given_up_after_five_and_the_engine_goes_on",
    ),
    Fault(
        "windows are those of the configuration, heeded or not",
        "engine/target.py",
        "heeded = beyond is expected or not torch.equal(beyond, expected)",
        "heeded = True",
        "tests/engine/test_target.py",
    ),
    Fault(
        "windows are not tried",
        "engine/model/windows.py",
        "named = {",
        "return (yield False)\n    named = {",
        "tests/engine/test_target.py",
    ),
)


def judge() -> bool:
    """Print a line for each module and each survivor without a reason. Returns whether all is well."""
    entries = yaml.safe_load((ROOT / "tests" / "survivors.yaml").read_text())
    well = True
    for path in walk_mutatable_files():
        results = SourceFileMutationData(path=path)
        results.load()
        if not (found := results.exit_code_by_key):
            continue
        explained = {line for entry in entries.get(str(path), []) for line in entry["becomes"]}
        survivors = [name for name, exit_code in found.items() if exit_code in _SURVIVED]
        dead = 1 - len(survivors) / len(found)
        becomes = {name: _mutated(name, path) for name in survivors}
        unexplained = {name: line for name, line in becomes.items() if line not in explained}
        print(f"{path}: {len(found)} mutants, {dead:.1%} dead, {len(survivors)} alive, {len(unexplained)} unexplained")
        for name, line in unexplained.items():
            print(f"    {name}: {line}")
        well &= dead >= LEAST and not unexplained
    return well


def _mutated(name: str, path: Path) -> str:
    """What the mutant's changed lines have become, in one line."""
    lines = get_diff_for_mutant(name, path=path).splitlines()
    return " ".join(line[1:].strip() for line in lines if line.startswith("+") and not line.startswith("+++"))


def plant() -> bool:
    """Plant each of the faults in a copy. Returns whether all were seen."""
    seen: Counter[bool] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            shutil.copytree(source, copy / name) if source.is_dir() else shutil.copy(source, copy)
        for fault in FAULTS:
            file = copy / fault.file
            text = file.read_text()
            assert text.count(fault.right) == 1, f"{fault.file} does not hold once: {fault.right}"
            file.write_text(text.replace(fault.right, fault.wrong))
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", fault.tests]
            done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
            file.write_text(text)
            seen[done.returncode == 1] += 1
            print(f"{'seen' if done.returncode == 1 else 'NOT SEEN'}: {fault.name}")
    return not seen[False]


if __name__ == "__main__":
    raise SystemExit(not all([judge(), plant()]))
