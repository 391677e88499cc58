"""A head takes its place as a whole or not at all."""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path

import pytest
from filelock import FileLock

from engine.core.errors import ModelError
from engine.weights import installed_head
from engine.weights.installed_head import install, made_for


def head_in(folder: Path, content: str = "head") -> Path:
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "training.json"):
        (folder / name).write_text(content)
    return folder


@pytest.mark.parametrize(("number", "fix"), [(errno.ENOSPC, "make room and run"), (errno.EACCES, "see to it")])
def test_nothing_of_a_head_stays_that_could_not_be_written(
    number: int, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path, content: bytes) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(installed_head, "write_whole", fails)
    with pytest.raises(ModelError, match=rf"cannot be written \(no\): {fix}"):
        install(head_in(tmp_path / "head"), tmp_path / "heads" / "x", "model", "one")
    assert not [*(tmp_path / "heads" / "x").iterdir()]


def test_two_tunings_do_not_install_at_once(tmp_path: Path) -> None:
    tuned, head = tmp_path / "heads" / "x", head_in(tmp_path / "head")
    tuned.parent.mkdir()
    with ThreadPoolExecutor() as pool:
        with FileLock(tuned.with_name(".x.lock"), thread_local=False):
            installing = pool.submit(install, head, tuned, "model", "one")
            with pytest.raises(FutureTimeout):
                installing.result(0.3)
            assert made_for(tuned) is None
        installing.result()
    assert made_for(tuned) == ("model", "one")
