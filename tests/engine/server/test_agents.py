"""Clients as they are installed, each where it is there: a turn with tools and a second one, which finds the first in
the prefix cache. TALON_CODER is the GGUF file of Qwen2.5-Coder-0.5B-Instruct. What the model says is not compared.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.engine.server.figures import until
from tests.engine.server.process import ServerProcess, serving

CODER = os.environ.get("TALON_CODER", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not Path(CODER).is_file(), reason="TALON_CODER names no GGUF file"),
]
QUIET = {
    "ANONYMIZED_TELEMETRY": "false",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DO_NOT_TRACK": "1",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OTEL_SDK_DISABLED": "true",
}
FIRST, SECOND = "Read the file notes.txt, then list the files. Use the tools.", "And how many are they?"
_SDK = """
import asyncio
from agents import Agent, MaxTurnsExceeded, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool
from openai import AsyncOpenAI

@function_tool
def weather(city: str) -> str:
    "Tell the weather of a city."
    return f"{{city}}: sunny"

async def main():
    model = OpenAIChatCompletionsModel("coder", AsyncOpenAI(base_url="{url}/v1", api_key="none"))
    settings = ModelSettings(temperature=0, max_tokens=100)
    agent = Agent("a", instructions="Use the tool.", model=model, model_settings=settings, tools=[weather])
    for city in ("Rome and in Oslo", "Bern"):
        answer = Runner.run_streamed(agent, "What is the weather in " + city + "?", max_turns=3)
        try:
            async for _ in answer.stream_events():
                pass
        except MaxTurnsExceeded:
            print("the model goes on calling")

asyncio.run(main())
"""


class Client(NamedTuple):
    """program: its command, or a Python module. turns: the arguments of each call; {url} is the server's. files: what
    it reads in its folder. variables: of its environment. least: tokens of its first prompt, at least.
    """

    program: str
    turns: Sequence[Sequence[str]]
    files: dict[str, str]
    variables: dict[str, str]
    least: int

    def missing(self) -> str:
        """Why it cannot run; empty if it can."""
        there = find_spec(self.program) if self.program == "agents" else shutil.which(self.program)
        return "" if there else f"{self.program} is not installed"


_CLAUDE = ("--model", "coder", "--max-turns", "3", "--allowedTools", "Bash,Read")
_AIDER = (
    "--model", "openai/coder", "--no-git", "--yes-always", "--no-show-model-warnings", "--no-check-update",
    "--analytics-disable", "--no-suggest-shell-commands", "--map-tokens", "0",
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
CLIENTS = {
    "Claude Code": Client(
        "claude",
        [("-p", FIRST, *_CLAUDE), ("-c", "-p", SECOND, *_CLAUDE)],
        {},
        {
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_SMALL_FAST_MODEL": "coder",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "100",
        },
        10_000,
    ),
    "opencode": Client(
        "opencode",
        [("run", "-m", "talon/coder", FIRST), ("run", "-c", "-m", "talon/coder", SECOND)],
        {"opencode.json": json.dumps(_OPENCODE)},
        {},
        4_000,
    ),
    "aider": Client(
        "aider",
        [
            (*_AIDER, "--message", "Write hello into notes.txt.", "notes.txt"),
            (*_AIDER, "--restore-chat-history", "--message", "And now bye.", "notes.txt"),
        ],
        {},
        {"OPENAI_API_BASE": "{url}/v1", "OPENAI_API_KEY": "none", "AIDER_ANALYTICS": "false"},
        1_000,
    ),
    "llm": Client(
        "llm",
        [
            ("-m", "coder", "-T", "llm_version", "-o", "max_tokens", "40", "Which version is this?"),
            ("-c", "-m", "coder", "-o", "max_tokens", "40", SECOND),
        ],
        {"extra-openai-models.yaml": json.dumps(_LLM)},
        {"LLM_USER_PATH": "{folder}", "OPENAI_API_KEY": "none"},
        100,
    ),
    "openai-agents": Client("agents", [("-c", _SDK)], {}, {}, 100),
}


@pytest.fixture(scope="module")
def coder() -> Iterator[ServerProcess]:
    with serving("--set", f"model={CODER}", "--served-model-name", "coder") as running:
        yield running


def run(client: Client, server: ServerProcess, folder: Path) -> None:
    """All turns of a client, in a folder that is its home too. It may fail: the model is a small one."""

    def filled(text: str) -> str:
        return text.replace("{url}", server.url).replace("{folder}", str(folder))

    for name, text in {"notes.txt": "a note\n", **client.files}.items():
        (folder / name).write_text(filled(text))
    own = {name: filled(text) for name, text in client.variables.items()}
    program = sys.executable if client.program == "agents" else client.program
    for turn in client.turns:
        command = [program, *(part.format(url=server.url) if part is _SDK else part for part in turn)]
        environment = os.environ | QUIET | own | {"HOME": str(folder)}
        subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=400,
            check=False,
        )


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_takes_a_turn_and_another_one_from_the_prefix_cache(
    coder: ServerProcess, tmp_path: Path, name: str
) -> None:
    client = CLIENTS[name]
    if why := client.missing():
        pytest.skip(why)
    before = len(coder.requests())
    run(client, coder, tmp_path)
    until(lambda: len(coder.requests()) >= before + len(client.turns))
    asked = [line for line in coder.requests()[before:] if line["method"] == "POST"]
    assert {line["status"] for line in asked} == {200}, [line.get("error") for line in asked]
    first, last = asked[0], asked[-1]
    assert first["prompt_tokens"] >= client.least and len(asked) >= 2
    assert last["cached_tokens"] >= 0.8 * min(first["prompt_tokens"], last["prompt_tokens"])
