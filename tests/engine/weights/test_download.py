from __future__ import annotations

import shutil
import threading
from pathlib import Path

from engine.weights.download import bytes_in


def test_folders_that_pip_removes_while_it_is_watched_count_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "some.whl").write_bytes(bytes(1000))
    ended = threading.Event()

    def unpack() -> None:
        while not ended.is_set():
            (tmp_path / "pip-unpack" / "deep").mkdir(parents=True)
            shutil.rmtree(tmp_path / "pip-unpack")

    pip = threading.Thread(target=unpack)
    pip.start()
    try:
        assert {bytes_in(tmp_path) for _ in range(2000)} == {1000}
    finally:
        ended.set()
        pip.join()
