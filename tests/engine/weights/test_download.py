from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

from engine.weights.download import bytes_in

DOWNLOAD = """
import sys
from pathlib import Path
from engine.weights.catalogue import CATALOGUE
from engine.weights.download import download
download(next(iter(CATALOGUE.values())), Path(sys.argv[1]), lambda *_: None)
"""


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


def test_pip_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as index:  # accepts pip's connection and answers nothing
        index.settimeout(60)
        asked = {"PIP_INDEX_URL": f"http://127.0.0.1:{index.getsockname()[1]}", "PIP_DEFAULT_TIMEOUT": "600"}
        starter = subprocess.Popen([sys.executable, "-c", DOWNLOAD, str(tmp_path)], env=os.environ | asked)
        connection, _ = index.accept()
        with connection:
            connection.settimeout(60)
            starter.kill()
            starter.wait()
            while connection.recv(4096):  # the request, and its end once pip has ended
                pass
