"""`make mutants`: do the tests see faults? Judges what mutmut has tried, and plants some faults of its own.

mutmut plants small faults (an operator, a constant, an argument) in the modules that pyproject.toml names, one at a
time, and runs the tests of the function. There are over two thousand, so a run tries a sample: so many of each module,
drawn with a seed, and all of a module that has fewer. What no test sees must stand in survivors.yaml, with the reason
why it is no fault. The faults planted here are larger than what mutmut thinks of; each of them once went unseen.
"""

from __future__ import annotations

import argparse
import io
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import yaml
from mutmut.__main__ import copy_also_copy_files, copy_src_dir, create_mutants, setup_source_paths
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
        "engine/costs/cost_model.py",
        "best = order[: self",
        "best = np.sort(order)[: self",
        "tests/engine/verifier/test_loop.py",
    ),
    Fault(
        "a tree may reach beyond the context",
        "engine/verifier/drafter_link.py",
        "fits = len(request.text) + int(tree.depths.max()) <= self.target.context",
        "fits = True",
        "tests/engine/verifier/test_loop.py",
    ),
    Fault(
        "successors are told of the first nodes instead of those verified",
        "engine/verifier/step.py",
        "ranked[self.kept] =",
        "ranked[: len(self.kept)] =",
        "tests/engine/verifier/test_loop.py",
    ),
    Fault(
        "a verdict names nodes of the cut tree",
        "engine/verifier/step.py",
        "self.kept[path].tolist()",
        "path",
        "tests/engine/verifier/test_loop.py",
    ),
    Fault(
        "the verifier ignores Cancel",
        "engine/verifier/loop.py",
        "                    self._forget(request)\n            else:",
        "                    pass\n            else:",
        "tests/engine/verifier/test_loop.py",
    ),
    Fault(
        "the front end never sends Cancel",
        "engine/frontend/supervisor.py",
        "self.router.send(request.verifier, Cancel(request=request.number))",
        "pass",
        "tests/engine/test_api.py::test_leaving_the_block_of_a_stream_ends_its_request_in_the_verifier",
    ),
    Fault(
        "a request that ends every verifier is handed on for ever",
        "engine/frontend/inflight.py",
        "if request.lost == _GIVEN_UP:",
        "if False:",
        "tests/faults/test_batching.py::"
        "test_a_request_that_ends_every_verifier_is_given_up_after_five_and_no_other_is_lost",
    ),
    Fault(
        "windows are those of the configuration, heeded or not",
        "engine/model/trial/probe.py",
        "return self.beyond is None or not torch.equal(self.beyond, self.expected)",
        "return True",
        "tests/engine/model/test_target.py",
    ),
    Fault(
        "windows are not tried",
        "engine/model/trial/windows.py",
        "return bool(_named(config))",
        "return False",
        "tests/engine/model/test_target.py",
    ),
)


def drawn(most: int, seed: int) -> dict[Path, list[str]]:
    """Plant all mutants, and draw those to try: module -> names, `most` of a module at most."""
    shutil.rmtree("mutants", ignore_errors=True)
    Path("mutants").mkdir()
    with redirect_stdout(io.StringIO()):
        copy_src_dir()
        copy_also_copy_files()
        setup_source_paths()
        create_mutants(1)
    found = {path: sorted(names) for path in walk_mutatable_files() if (names := _tried(path))}
    return {path: random.Random(f"{seed} {path}").sample(names, min(most, len(names))) for path, names in found.items()}


def try_all(sample: dict[Path, list[str]], children: int) -> None:
    """Run the tests of each mutant; mutmut keeps what came of it."""
    names = [name for names in sample.values() for name in names]
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(children), *names]
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise SystemExit("mutmut: failed; is a test red without any fault? Run pytest first")


def judge(sample: dict[Path, list[str]]) -> bool:
    """Print a line for each module and each survivor without a reason. Returns whether all is well."""
    entries = yaml.safe_load((ROOT / "tests" / "survivors.yaml").read_text())
    well = True
    for path, names in sample.items():
        results = _tried(path)
        explained = {line for entry in entries.get(str(path), []) for line in entry["becomes"]}
        survivors = [name for name in names if results[name] in _SURVIVED]
        dead = 1 - len(survivors) / len(names)
        becomes = {name: _mutated(name, path) for name in survivors}
        unexplained = {name: line for name, line in becomes.items() if line not in explained}
        print(
            f"{path}: {len(names)} of {len(results)} mutants, {dead:.1%} dead, {len(survivors)} alive, "
            f"{len(unexplained)} unexplained"
        )
        for name, line in unexplained.items():
            print(f"    {name}: {line}")
        well &= dead >= LEAST and not unexplained
    return well


def _tried(path: Path) -> dict[str, int | None]:
    """Exit codes of the tests by mutant, None where it was not tried."""
    results = SourceFileMutationData(path=path)
    results.load()
    return results.exit_code_by_key


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


def main() -> int:
    options = argparse.ArgumentParser(description="Do the tests see faults?")
    options.add_argument("--most", type=int, default=60, help="mutants of a module to try")
    options.add_argument("--seed", type=int, default=1, help="which ones")
    options.add_argument("--children", type=int, default=2, help="processes at once")
    given = options.parse_args()
    sample = drawn(given.most, given.seed)
    try_all(sample, given.children)
    return 0 if all([judge(sample), plant()]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
