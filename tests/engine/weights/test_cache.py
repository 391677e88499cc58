from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine.core.errors import ModelError
from engine.weights.cache import MANIFEST, home, keep

BUILDING = """
import sys, time
from pathlib import Path
from engine.weights.cache import home, keep

def build(folder):
    with (home() / "builds").open("a") as log:
        log.write("x")
    (folder / "a").write_text("half")
    while not Path(sys.argv[1]).exists():
        time.sleep(0.01)
    (folder / "a").write_text("whole")

print(keep(home() / "models" / "m", "model=m", 0, build, lambda stage, *_: print(stage, flush=True)))
"""


def nothing(*_: Any) -> None:
    """Nobody watches the progress."""


def whole(folder: Path) -> None:
    (folder / "a").write_text("whole")


def building(go_on: Path) -> subprocess.Popen[str]:
    """Another process that builds the folder, once that file is there."""
    return subprocess.Popen([sys.executable, "-c", BUILDING, str(go_on)], stdout=subprocess.PIPE, text=True)


def wait_for_half() -> None:
    while not list(home().glob("models/.m.*.partial/a")):
        time.sleep(0.01)


def left() -> list[str]:
    return sorted(str(path.relative_to(home())) for path in home().rglob("*") if path.is_file())


def test_the_cache_folder_can_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert home() == tmp_path / "home"
    monkeypatch.delenv("TALON_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert home() == tmp_path / "xdg" / "talon"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert home() == Path.home() / ".cache" / "talon"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, ModelError])
def test_a_build_that_fails_leaves_nothing(error: type[BaseException]) -> None:
    def build(folder: Path) -> None:
        whole(folder)
        raise error

    with pytest.raises(error):
        keep(home() / "m", "model=m", 0, build, nothing)
    assert left() == [".m.lock"]


def test_too_little_room_is_told_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        free: int = 5_000_000

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage())
    with pytest.raises(ModelError) as caught:
        keep(home() / "m", "model=m", 370_000_000, lambda _: pytest.fail("built"), nothing)
    assert str(caught.value) == (
        f"model=m: needs 370 MB in {home()}, where 5 MB are left; make room, or set TALON_HOME to a folder on a larger "
        "disk"
    )


def test_a_disk_that_fills_up_on_the_way_is_one_line_and_leaves_nothing() -> None:
    def build(folder: Path) -> None:
        whole(folder)
        with open("/dev/full", "w") as full:
            full.write("x")

    with pytest.raises(ModelError, match=r"^model=m: no space left in .*; make room, or set TALON_HOME"):
        keep(home() / "m", "model=m", 0, build, nothing)
    assert left() == [".m.lock"]


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/talon"])
def test_a_cache_that_cannot_be_written_is_one_line(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TALON_HOME", str(tmp_path / place))
    with pytest.raises(ModelError) as caught:
        keep(home() / "models" / "m", "model=m", 0, whole, nothing)
    told = str(caught.value)
    assert told.startswith(f"model=m: the cache TALON_HOME={tmp_path / place} cannot be written (")
    assert told.endswith("set TALON_HOME to a folder that you may write to") and "\n" not in told


def test_what_is_there_is_used_though_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = keep(home() / "m", "model=m", 0, whole, nothing)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: pytest.fail("written"))
    assert keep(folder, "model=m", 0, whole, nothing) == folder


def test_of_two_processes_one_builds_and_the_other_waits(tmp_path: Path) -> None:
    first = building(tmp_path / "go on")
    wait_for_half()
    second = building(tmp_path / "go on")
    assert second.stdout is not None
    assert second.stdout.readline() == "waiting for another process that makes m\n"
    (tmp_path / "go on").touch()
    folder = f"{home() / 'models' / 'm'}\n"
    assert [process.communicate(timeout=60)[0] for process in (first, second)] == [folder, folder]
    assert (home() / "builds").read_text() == "x"


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    killed = building(tmp_path / "never")
    wait_for_half()
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not (home() / "models" / "m").exists()
    building(tmp_path).communicate(timeout=60)
    assert left() == ["builds", "models/.m.lock", "models/m/a", f"models/m/{MANIFEST}"]
    assert (home() / "models" / "m" / "a").read_text() == "whole"
