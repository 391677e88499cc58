"""Clients as they are installed, each where it is there: a turn with tools, a second one, which finds the first in the
prefix cache, and of SDKs an answer that is cancelled. `make agents` installs those that take less than a minute, and
runs this. What the model says is not compared.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine.weights.cache import home
from tests.engine.server.figures import until
from tests.engine.server.process import ROOT, ServerProcess, serving

CODER = Path(os.environ.get("TALON_CODER") or home() / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf")
INSTALLED = Path(os.environ.get("TALON_CLIENTS") or ROOT / ".venv-clients")
SDKS = Path(__file__).parent / "sdks"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CODER.is_file(), reason=f"no {CODER}; or let TALON_CODER name that GGUF file"),
]
QUIET = {
    "ANONYMIZED_TELEMETRY": "false",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DO_NOT_TRACK": "1",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OTEL_SDK_DISABLED": "true",
}
FIRST, SECOND = "Read the file notes.txt, then list the files. Use the tools.", "And how many are they?"


@dataclass(frozen=True)
class Client:
    """name: of the folder that it is installed in. turns: its calls; {url} is the server's, {program} the client, and
    {folder} where it runs. least: tokens of its first prompt, at least. files: what it reads there. variables: of its
    environment. program: its command. cancels: whether its last turn ends with a cancelled answer.
    """

    name: str
    turns: Sequence[Sequence[str]]
    least: int
    files: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    program: str = "python"
    cancels: bool = False

    def found(self) -> str | None:
        """Return the path of its program, if it is installed."""
        places = (INSTALLED / self.name / "bin", INSTALLED / self.name / "node_modules" / ".bin")
        elsewhere = "" if self.program == "python" else f"{os.pathsep}{os.environ['PATH']}"
        return shutil.which(self.program, path=os.pathsep.join(map(str, places)) + elsewhere)


def sdk(name: str, least: int) -> Client:
    """Return a library as a client: a script of ours that uses it."""
    script = str(SDKS / f"ask_{name.replace('-', '_')}.py")
    return Client(name, [("{program}", script, "{url}")], least, cancels=True)


_CONNECT = (sys.executable, "-m", "engine", "connect", "--url", "{url}")
_CLAUDE = (*_CONNECT, "claude", "--", "--max-turns", "3", "--allowedTools", "Bash,Read", "-p")
_CODEX = (*_CONNECT, "codex", "--", "exec", "-C", "{folder}", "--skip-git-repo-check", "-s", "read-only")
_AIDER = (
    "{program}", "--model", "openai/coder", "--no-git", "--yes-always", "--no-show-model-warnings",
    "--no-check-update", "--analytics-disable", "--no-suggest-shell-commands", "--map-tokens", "0",
)  # fmt: skip
_OPENCODE = {
    "autoupdate": False,
    "provider": {
        "talon": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{url}/v1", "apiKey": "none"},
            "models": {"coder": {"limit": {"context": 32768, "output": 300}}},
        }
    },
}
_LLM = [
    {"model_id": "coder", "model_name": "coder", "api_base": "{url}/v1", "supports_tools": True}
]  # JSON is YAML too
_LLM_OPTIONS = ("-m", "coder", "-T", "llm_version", "-o", "max_tokens", "40")
CLIENTS = [
    Client(
        "claude",
        [(*_CLAUDE, FIRST), (*_CLAUDE, SECOND, "-c")],
        10_000,
        variables={"CLAUDE_CODE_MAX_OUTPUT_TOKENS": "100", "IS_SANDBOX": "1"},
        program="claude",
    ),
    Client(
        "codex",
        [(*_CODEX, FIRST), (*_CODEX, "resume", "--last", SECOND)],
        6_000,
        variables={"CODEX_HOME": "{folder}"},
        program="codex",
    ),
    Client(
        "opencode",
        [("{program}", "run", "-m", "talon/coder", FIRST), ("{program}", "run", "-c", "-m", "talon/coder", SECOND)],
        4_000,
        files={"opencode.json": json.dumps(_OPENCODE)},
        program="opencode",
    ),
    Client(
        "aider",
        [
            (*_AIDER, "--message", "Write hello into notes.txt.", "notes.txt"),
            (*_AIDER, "--restore-chat-history", "--message", "And now bye.", "notes.txt"),
        ],
        500,
        variables={"OPENAI_API_BASE": "{url}/v1", "OPENAI_API_KEY": "none", "AIDER_ANALYTICS": "false"},
        program="aider",
    ),
    Client(
        "llm",
        [("{program}", *_LLM_OPTIONS, "Which version is this?"), ("{program}", "-c", *_LLM_OPTIONS, SECOND)],
        100,
        files={"extra-openai-models.yaml": json.dumps(_LLM)},
        variables={"LLM_USER_PATH": "{folder}", "OPENAI_API_KEY": "none"},
        program="llm",
    ),
    sdk("openai-agents", 100),
    sdk("pydantic-ai", 100),
    sdk("langgraph", 100),
    sdk("smolagents", 600),
]


@pytest.fixture(scope="module")
def coder() -> Iterator[ServerProcess]:
    with serving("--set", f"model={CODER}", "--served-model-name", "coder") as running:
        yield running


def run(client: Client, program: str, server: ServerProcess, folder: Path) -> None:
    """Take all turns of a client, in a folder that is its home too. Those of ours must not fail."""

    def filled(text: str) -> str:
        named = {"{url}": server.url, "{folder}": str(folder), "{program}": program}
        for name, value in named.items():
            text = text.replace(name, value)
        return text

    for name, text in {"notes.txt": "a note\n", **client.files}.items():
        (folder / name).write_text(filled(text))
    own = {name: filled(text) for name, text in client.variables.items()}
    paths = {"PATH": f"{Path(program).parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    for turn in client.turns:
        done = subprocess.run(
            list(map(filled, turn)),
            cwd=folder,
            env=os.environ | QUIET | paths | own | {"HOME": str(folder), "PWD": str(folder)},  # as a shell would
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert not (done.returncode and client.program == "python"), done.stderr


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client_takes_a_turn_and_another_one_from_the_prefix_cache(
    coder: ServerProcess, tmp_path: Path, client: Client
) -> None:
    if (program := client.found()) is None:
        pytest.skip(f"{client.name} is not installed: make agents")
    before = len(coder.requests())
    run(client, program, coder, tmp_path)
    until(lambda: len(coder.requests()) >= before + len(client.turns))
    asked = [line for line in coder.requests()[before:] if line["method"] == "POST"]
    assert {line["status"] for line in asked} == {200}, [line.get("error") for line in asked]
    # some ask for a title beside the first turn, which is short
    whole = [line for line in asked if not line.get("client_left") and line.get("prompt_tokens", 0) >= client.least]
    assert len(whole) >= 2
    assert whole[-1]["cached_tokens"] >= 0.8 * min(whole[0]["prompt_tokens"], whole[-1]["prompt_tokens"])
    if client.cancels:
        until(lambda: coder.requests()[-1].get("client_left", False))
