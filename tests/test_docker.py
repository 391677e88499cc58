"""The Dockerfile's commands as a script: there need be no Docker here."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")


def test_what_the_image_starts_is_a_command_that_exists() -> None:
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", TEXT, re.MULTILINE)
    command = [sys.executable, "-m", "engine", *[word.strip('", ') for word in entry.strip("[]").split(",")][1:]]
    done = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "--api-keys" in done.stdout


def test_the_scripts_are_shell_and_refuse_other_devices(tmp_path: Path) -> None:
    for command in re.findall(r"^RUN (.*)$", TEXT, re.MULTILINE):
        subprocess.run(["sh", "-n", "-c", command], check=True)
    script = ROOT / "docker" / "install.sh"
    done = subprocess.run(["sh", str(script), str(tmp_path / "env"), "tpu"], capture_output=True, text=True)
    assert done.returncode == 2 and "say cpu or cuda" in done.stderr and not (tmp_path / "env").exists()


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()


def test_the_health_check_asks_the_server_itself_though_there_is_a_proxy() -> None:
    (check,) = re.findall(r"^HEALTHCHECK .*CMD (\[.*\])$", TEXT, re.MULTILINE)
    _, *arguments = json.loads(check)
    with ThreadingHTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        asked = [argument.replace(":8000", f":{server.server_port}") for argument in arguments]
        environment = {"PATH": os.environ["PATH"], "http_proxy": "http://127.0.0.1:1"}
        done = subprocess.run([sys.executable, *asked], env=environment, capture_output=True, text=True, timeout=120)
        server.shutdown()
        thread.join()
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_build_stage_installs_a_server(tmp_path: Path, device: str) -> None:
    (command,) = re.findall(r"^RUN (sh /src/.*)$", TEXT, re.MULTILINE)
    script = command.replace("/src", shlex.quote(str(ROOT))).replace("/opt/talon", shlex.quote(str(tmp_path / "talon")))
    subprocess.run(["sh", "-euc", script.replace('"$DEVICE"', device)], check=True, timeout=1800)
    talon = tmp_path / "talon" / "bin" / "talon"
    done = subprocess.run([str(talon), "serve", "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "--api-keys" in done.stdout
