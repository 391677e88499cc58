"""Tests that run in forks: each once, all of a file in one process, and a fork that dies fails one test alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.forked_tests import scope

ROOT = Path(__file__).parents[1]
FIRST = """
import os, signal, warnings
import pytest

@pytest.fixture(scope="module")
def process():
    yield os.getpid()
    open("torn_down", "a").write("once ")

def test_passes(process):
    print("some output")

def test_fails(process):
    print("told by the test that fails")
    assert os.getpid() != process

def test_dies(process):
    os.kill(os.getpid(), signal.SIGKILL)

def test_behind_it_runs_in_another(process):
    warnings.warn("a warning of a test")
    assert os.getpid() == process
"""
SECOND = """
import pytest

@pytest.mark.skip(reason="not here")
def test_skipped(): pass

@pytest.mark.parametrize("number", range(40))
def test_passes(number): pass
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of two files of tests, where they ran in two forks."""
    folder = tmp_path_factory.mktemp("tests")
    (folder / "test_first.py").write_text(FIRST)
    (folder / "test_second.py").write_text(SECOND)
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(folder), "-p", "tests.forked_tests"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TALON_TESTS_FORK_SERVER": "none is needed"}
    options = ["--forks", "2", "-p", "no:cacheprovider", "--disable-plugin-autoload", "--junit-xml", "results.xml"]
    done = subprocess.run([*command, *options], cwd=folder, env=environment, capture_output=True, text=True)
    (folder / "told").write_text(done.stdout)
    assert done.returncode == 1, done.stderr
    return folder


def outcomes(folder: Path) -> dict[str, str]:
    """Return what came of each test: how it failed or was skipped, or an empty text."""
    cases = ElementTree.parse(folder / "results.xml").iter("testcase")
    return {f"{case.get('classname')}.{case.get('name')}": "".join(each.tag for each in case) for case in cases}


def test_every_test_runs_once_and_its_outcome_is_reported(folder: Path) -> None:
    found = outcomes(folder)
    assert {name: outcome for name, outcome in found.items() if outcome} == {
        "test_first.test_fails": "failure",
        "test_first.test_dies": "failure",
        "test_second.test_skipped": "skipped",
    }
    assert len(found) == 4 + 41
    assert "2 failed, 42 passed, 1 skipped, 1 warning" in (folder / "told").read_text()


def test_what_a_failed_test_printed_and_the_end_of_one_that_died_are_told(folder: Path) -> None:
    told = (folder / "told").read_text()
    assert "told by the test that fails" in told and "some output" not in told
    assert "the process of this test ended with -9" in told
    assert "a warning of a test" in told


def test_the_fixtures_of_a_file_are_torn_down_once_in_each_process_that_lives(folder: Path) -> None:
    assert (folder / "torn_down").read_text() == "once "


def test_files_that_share_servers_run_in_one_process_and_others_each_in_one() -> None:
    same = {
        scope("tests/engine/server/test_wire.py::test_a[x::y]"),
        scope("tests/engine/server/http/test_guard.py::test_b"),
    }
    assert len(same) == 1
    assert scope("tests/engine/test_api.py::test_a[x::y]") == scope("tests/engine/test_api.py::test_b")
    assert scope("tests/engine/test_api.py::test_a") != scope("tests/engine/test_cache.py::test_a")
