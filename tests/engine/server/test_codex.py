"""Codex itself, as it is installed (`npm install -g @openai/codex`), with a model that calls tools: TALON_CODER is the
GGUF file of Qwen2.5-Coder-0.5B-Instruct. The model draws its answers, so what it says is not compared.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.server.figures import metric
from tests.engine.server.process import ROOT, ServerProcess, serving

CODER = os.environ.get("TALON_CODER", "")
pytestmark = [
    pytest.mark.skipif(shutil.which("codex") is None, reason="npm install -g @openai/codex"),
    pytest.mark.skipif(not Path(CODER).is_file(), reason="TALON_CODER names no GGUF file"),
]
OWN_TOKENS = 6000  # of Codex's prompt, at least


def codex(server: ServerProcess, folder: Path, *arguments: str) -> str:
    """Run a turn in the folder, started by `talon connect`."""
    command = [sys.executable, "-m", "engine", "connect", "codex", "--url", server.url, "--", "exec", "-C", str(folder)]
    options = ["--skip-git-repo-check", "-s", "read-only"]
    (home := folder / "home").mkdir(exist_ok=True)
    done = subprocess.run(
        [*command, *options, *arguments],
        cwd=ROOT,
        env=os.environ | {"CODEX_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(900)
def test_codex_takes_a_turn_and_another_one_from_the_prefix_cache(tmp_path: Path) -> None:
    with serving("--set", f"model={CODER}", "--served-model-name", "coder") as server:
        codex(server, tmp_path, "Call the tool exec_command with cmd ls. Then say which files there are.")
        before = metric(server, "vllm:prefix_cache_hits_total")
        codex(server, tmp_path, "resume", "--last", "And how many are they?")
        assert metric(server, "vllm:prefix_cache_hits_total") - before > OWN_TOKENS
        asked = [line for line in server.requests() if line["path"] == "/v1/responses"]
        assert len(asked) >= 2 and {line["status"] for line in asked} == {200}
