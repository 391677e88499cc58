"""`talon connect`: what a client is told, and the client that it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from engine.cli.agents import AGENTS, ServedModel
from tests.command import talon
from tests.engine.server.process import KEY, ROOT, ServerProcess

CLIENT = """#!{python}
import json, os, sys
with open({told!r}, "w") as file:
    json.dump({{"arguments": sys.argv[1:], "environment": dict(os.environ)}}, file)
sys.exit(3)
"""
LOCAL = ServedModel("http://127.0.0.1:8000", "none", "coder", 32768)
HOSTILE = '"}, x={a="\\é😀 $url {env:HOME} {file:~/.netrc} ${{ secrets.KEY }}\''
Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def listening(answer: Answer) -> Iterator[str]:
    """A server's address, every GET of which is answered so."""
    handler = type("Handler", (BaseHTTPRequestHandler,), {"do_GET": answer, "log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def telling(model: object, context: object = 32768) -> Answer:
    """A server with a model of that name."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        content = json.dumps({"data": [{"id": model, "context_length": context}]}).encode()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    return answer


@pytest.fixture
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Return the environments of the clients that are started, each of which ends at once."""
    found: list[dict[str, str]] = []

    def end(program: str, command: list[str], environment: dict[str, str]) -> None:
        found.append(environment)
        raise SystemExit(3)

    for name in ("claude", "codex", "opencode", "aider", "litellm"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("engine.cli.connect.os.execve", end)
    return found


def test_codex_is_started_with_the_servers_model_and_its_context(tool_server: ServerProcess, tmp_path: Path) -> None:
    program, told = tmp_path / "codex", tmp_path / "told.json"
    program.write_text(CLIENT.format(python=sys.executable, told=str(told)))
    program.chmod(0o755)
    command = [sys.executable, "-m", "engine", "connect", "codex", "--url", f"{tool_server.url}/v1/"]
    done = subprocess.run(
        [*command, "--", "exec", "--json", "Hi"],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 3, done.stderr
    started = json.loads(told.read_text())
    assert started["arguments"][-3:] == ["exec", "--json", "Hi"]
    settings = [one.partition("=") for one in started["arguments"][1:-3:2]]
    wanted = {"model_provider": '"talon"', "model": '"tiny"', "model_context_window": "4096"}
    assert {name: value for name, _, value in settings[:-1]} == wanted
    assert settings[-1][0] == "model_providers.talon" and f'base_url="{tool_server.url}/v1"' in settings[-1][2]
    assert "begins with about 8600 tokens of its own, and tiny holds 4096" in done.stderr


def test_claude_gets_the_key_and_learns_the_context(
    one_place: ServerProcess, environments: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TALON_API_KEY", KEY)
    assert talon("connect", "claude", "--url", one_place.url).exit_code == 3
    wanted = {
        "ANTHROPIC_BASE_URL": one_place.url,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "ANTHROPIC_MODEL": "tiny",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "32768",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4096",
    }
    assert wanted.items() <= environments[0].items()


@pytest.mark.parametrize("name", ["claude", "codex", "opencode", "aider", "litellm"])
def test_a_client_does_not_get_the_keys_of_other_providers_and_a_long_name_is_shortened(
    name: str, environments: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ("ANTHROPIC_API_KEY", "ANTHROPIC_CUSTOM_HEADERS", "CLAUDE_CODE_OAUTH_TOKEN", "CODEX_API_KEY")
    for variable in (*kept, "ANTHROPIC_AUTH_TOKEN", "OPENAI_API_KEY"):
        monkeypatch.setenv(variable, "sk-of-another")
    monkeypatch.setenv("OTHER", "stays")
    with listening(telling("a" * 500)) as url:
        done = talon("connect", name, "--url", url, "--key", KEY)
    assert done.exit_code == 3 and 0 < len(done.stderr.splitlines()[-1]) < 200
    assert "sk-of-another" not in environments[0].values() and environments[0]["OTHER"] == "stays"


def test_claude_does_not_ask_the_cloud_that_the_shell_names(
    environments: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    clouds = {f"CLAUDE_CODE_USE_{name}" for name in ("BEDROCK", "VERTEX", "FOUNDRY")}
    for variable in clouds:
        monkeypatch.setenv(variable, "1")
    with listening(telling("coder")) as url:
        assert talon("connect", "claude", "--url", url).exit_code == 3
        printed = talon("connect", "claude", "--print", "--url", url).stdout.splitlines()
    assert not clouds & environments[0].keys()
    assert clouds <= {name for line in printed if line.startswith("unset ") for name in line.split()}


def test_settings_are_printed_where_nothing_is_started(tool_server: ServerProcess) -> None:
    for arguments in (["claude", "--print"], ["langgraph"]):
        done = talon("connect", *arguments, "--url", tool_server.url)
        assert done.exit_code == 0 and tool_server.url in done.stdout and "tiny" in done.stdout


def check_refused(said: str, *arguments: str) -> None:
    """Look that the command ends with one line, which begins so."""
    done = talon("connect", *arguments)
    assert (done.exit_code, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith(f"talon: {said}") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nobody"], "connect nobody: is no client known here; there are claude, codex,"),
        (["codex", "--url", "here"], "--url here: is no address"),
        (["codex", "--url", "http://127.0.0.1:80a"], "--url http://127.0.0.1:80a: is no address"),
        (["codex", "--url", "http://127.0.0.1:99999"], "--url http://127.0.0.1:99999: is no address"),
        (["codex", "--url", "http://[::1"], "--url http://[::1: is no address"),
        (["codex", "--url", "http://"], "--url http:: is no address"),
        (["codex", "--url", "http://a b"], "--url http://a b: no server answers"),
        (["codex", "--url", "http://127.0.0.1:1"], "--url http://127.0.0.1:1: no server answers"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: list[str], said: str) -> None:
    check_refused(said, *arguments)


def test_a_key_that_is_wrong_and_a_client_that_is_not_there_are_one_line(
    one_place: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = f"--url {one_place.url}: wants an API key: give --key or TALON_API_KEY"
    check_refused(wrong, "codex", "--url", one_place.url, "--key", "wrong")
    monkeypatch.setenv("PATH", "/nowhere")
    absent = "connect opencode: opencode is not installed: npm"
    check_refused(absent, "opencode", "--url", one_place.url, "--key", KEY)


def greet(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"SSH-2.0-OpenSSH_9.9\r\n")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (telling("a\x1b[2J"), "the model's name is 'a\\x1b[2J', no text that prints: rename it there"),
        (telling("a\nb"), "the model's name is 'a\\nb', no text that prints"),
        (telling(7), "the model's name is 7, no text"),
        (telling(["coder"]), "the model's name is ['coder'], no text"),
        (telling("coder", "32768}"), "the model's context is '32768}', no number"),
        (telling("coder", True), "the model's context is True, no number"),
        (telling("coder", 1.5), "the model's context is 1.5, no number"),
        (greet, "no server answers (SSH-2.0-OpenSSH_9.9): start one with: talon serve\n"),
    ],
)
def test_what_a_server_tells_is_not_passed_on_unread(answer: Answer, said: str) -> None:
    with listening(answer) as url:
        check_refused(f"--url {url}: {said}", "opencode", "--print", "--url", url)


def test_the_key_does_not_follow_a_redirect() -> None:
    seen: list[str | None] = []

    def target(handler: BaseHTTPRequestHandler) -> None:
        seen.append(handler.headers["Authorization"])
        telling("coder")(handler)

    with listening(target) as elsewhere:

        def redirect(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(302)
            handler.send_header("Location", f"{elsewhere}/v1/models")
            handler.end_headers()

        with listening(redirect) as url:
            check_refused(f"--url {url}: answers /v1/models with status 302", "codex", "--url", url, "--key", KEY)
    assert seen == []


@pytest.mark.parametrize(
    ("host", "asked"), [("127.0.0.1", "server"), ("localhost", "server"), ("talon.invalid", "proxy")]
)
def test_a_proxy_does_not_see_the_key_of_a_server_on_this_machine(
    host: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with listening(telling("proxy")) as proxy, listening(telling("server")) as url:
        monkeypatch.setenv("http_proxy", proxy)
        done = talon("connect", "claude", "--print", "--url", url.replace("127.0.0.1", host))
    assert f"ANTHROPIC_MODEL={asked}\n" in done.stdout


def test_the_documentation_names_every_client() -> None:
    section = (ROOT / "docs" / "serving.md").read_text("utf8").partition("\n## Agents\n")[2].partition("\n```\n")[0]
    assert [name for name in AGENTS if f"`{name}`" not in section] == []


def test_a_clients_lines_begin_with_how_it_is_installed_and_where_settings_belong() -> None:
    first, setting = AGENTS["continue"].lines(LOCAL)
    assert first == "# npm install -g @continuedev/cli; ~/.continue/config.yaml, below models"
    assert setting.startswith("- {name: Talon") and 'model: "coder"' in setting


def test_a_hostile_name_stays_one_value_of_settings_and_is_itself_elsewhere() -> None:
    named = replace(LOCAL, model=HOSTILE)
    content = AGENTS["opencode"].variables(named)["OPENCODE_CONFIG_CONTENT"]
    settings: dict[str, Any] = json.loads(content)
    assert settings["model"] == f"talon/{HOSTILE}" and settings["provider"]["talon"]["models"].keys() == {HOSTILE}
    assert "{env:" not in content and "{file:" not in content
    _, line = AGENTS["continue"].lines(named)
    assert yaml.safe_load(line)[0]["model"] == HOSTILE and "{{" not in line
    assert AGENTS["claude"].variables(named)["ANTHROPIC_MODEL"] == HOSTILE
    assert AGENTS["aider"].started_by(named)[-1] == f"openai/{HOSTILE}"
    toml = pytest.importorskip("tomllib")  # Python 3.11
    settings = toml.loads("\n".join(AGENTS["codex"].started_by(named)[2::2]))
    assert settings.pop("model_providers").keys() == {"talon"}
    assert settings == {"model_provider": "talon", "model": HOSTILE, "model_context_window": 32768}
