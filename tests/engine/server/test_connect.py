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


def install(folder: Path, name: str) -> Path:
    """A client that writes down how it was started."""
    told = folder / "told.json"
    program = folder / name
    program.write_text(CLIENT.format(python=sys.executable, told=str(told)))
    program.chmod(0o755)
    return told


def connect(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own, which the client takes over."""
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", "engine", "connect", *arguments]
    more = os.environ | {"PATH": path, **environment}
    return subprocess.run(command, cwd=ROOT, env=more, capture_output=True, text=True, timeout=120)


def test_codex_is_started_with_the_servers_model_and_its_context(tool_server: ServerProcess, tmp_path: Path) -> None:
    told = install(tmp_path, "codex")
    done = connect(tmp_path, "codex", "--url", f"{tool_server.url}/v1/", "--", "exec", "--json", "Hi")
    assert done.returncode == 3, done.stderr
    started = json.loads(told.read_text())
    assert started["arguments"][-3:] == ["exec", "--json", "Hi"]
    settings = [one.partition("=") for one in started["arguments"][1:-3:2]]
    assert {name: value for name, _, value in settings[:-1]} == {
        "model_provider": '"talon"',
        "model": '"tiny"',
        "model_context_window": "4096",
    }
    assert settings[-1][0] == "model_providers.talon" and f'base_url="{tool_server.url}/v1"' in settings[-1][2]
    assert "begins with about 8600 tokens of its own, and tiny holds 4096" in done.stderr


def test_claude_gets_the_key_and_learns_the_context(one_place: ServerProcess, tmp_path: Path) -> None:
    told = install(tmp_path, "claude")
    assert connect(tmp_path, "claude", "--url", one_place.url, TALON_API_KEY=KEY).returncode == 3
    environment = json.loads(told.read_text())["environment"]
    wanted = {
        "ANTHROPIC_BASE_URL": one_place.url,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "ANTHROPIC_MODEL": "tiny",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "32768",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4096",
    }
    assert {name: environment[name] for name in wanted} == wanted


def test_settings_are_printed_where_nothing_is_started(tool_server: ServerProcess) -> None:
    for arguments in (["claude", "--print"], ["langgraph"]):
        done = talon("connect", *arguments, "--url", tool_server.url)
        assert done.exit_code == 0 and tool_server.url in done.stdout and "tiny" in done.stdout


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
    done = talon("connect", *arguments)
    assert done.exit_code == 2 and done.stderr.startswith(f"talon: {said}") and done.stderr.count("\n") == 1


def test_a_key_that_is_wrong_and_a_client_that_is_not_there_are_one_line(one_place: ServerProcess) -> None:
    wrong = talon("connect", "codex", "--url", one_place.url, "--key", "wrong")
    assert (wrong.exit_code, wrong.stderr) == (
        2,
        f"talon: --url {one_place.url}: wants an API key: give --key or TALON_API_KEY\n",
    )
    env = {"PATH": str(Path(sys.executable).parent)}
    absent = connect(Path("/nowhere"), "opencode", "--url", one_place.url, "--key", KEY, **env)
    assert absent.returncode == 2 and absent.stderr.startswith(
        "talon: connect opencode: opencode is not installed: npm"
    )


def test_the_documentation_names_every_client() -> None:
    section = (ROOT / "docs" / "serving.md").read_text("utf8").partition("\n## Agents\n")[2].partition("\n```\n")[0]
    assert [name for name in AGENTS if f"`{name}`" not in section] == []


def test_a_clients_lines_begin_with_how_it_is_installed_and_where_settings_belong() -> None:
    first, setting = AGENTS["continue"].lines(LOCAL)
    assert first == "# npm install -g @continuedev/cli; ~/.continue/config.yaml, below models"
    assert setting.startswith("- {name: Talon") and 'model: "coder"' in setting
    assert AGENTS["codex"].lines(LOCAL)[0] == "# npm install -g @openai/codex"


def test_a_hostile_name_stays_one_value_of_codexs_settings() -> None:
    toml = pytest.importorskip("tomllib")  # Python 3.11
    started = AGENTS["codex"].started_by(replace(LOCAL, model=HOSTILE))
    settings = toml.loads("\n".join(started[2::2]))
    assert settings.pop("model_providers").keys() == {"talon"}
    assert settings == {"model_provider": "talon", "model": HOSTILE, "model_context_window": 32768}


def test_a_hostile_name_stays_one_value_of_opencodes_settings() -> None:
    content = AGENTS["opencode"].variables(replace(LOCAL, model=HOSTILE))["OPENCODE_CONFIG_CONTENT"]
    settings = json.loads(content)
    assert settings["model"] == f"talon/{HOSTILE}" and settings["provider"]["talon"]["models"].keys() == {HOSTILE}
    assert "{env:" not in content and "{file:" not in content


def test_a_hostile_name_stays_one_value_of_continues_settings() -> None:
    _, line = AGENTS["continue"].lines(replace(LOCAL, model=HOSTILE))
    assert yaml.safe_load(line)[0]["model"] == HOSTILE and "{{" not in line


def test_what_is_no_setting_gets_the_name_as_it_is() -> None:
    named = replace(LOCAL, model=HOSTILE)
    assert AGENTS["claude"].variables(named)["ANTHROPIC_MODEL"] == HOSTILE
    assert AGENTS["aider"].started_by(named)[-1] == f"openai/{HOSTILE}"


@pytest.mark.parametrize("model", ["a\x1b[2J", "a\nb", 7, None, ["coder"]])
def test_a_models_name_that_does_not_print_is_refused(model: object) -> None:
    with listening(telling(model)) as url:
        done = talon("connect", "claude", "--print", "--url", url)
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr == f"talon: --url {url}: the model's name is {model!r}, no text that prints: rename it there\n"


@pytest.mark.parametrize("context", ["32768}", True, 1.5, None])
def test_a_context_that_is_no_number_is_refused(context: object) -> None:
    with listening(telling("coder", context)) as url:
        done = talon("connect", "opencode", "--print", "--url", url)
    assert done.exit_code == 2 and f"the model's context is {context!r}, no number" in done.stderr


def test_a_long_name_is_shortened_on_the_line_that_says_what_starts(tmp_path: Path) -> None:
    install(tmp_path, "aider")
    with listening(telling("a" * 500)) as url:
        done = connect(tmp_path, "aider", "--url", url)
    assert done.returncode == 3 and 0 < len(done.stderr) < 200


def test_a_port_that_speaks_no_http_is_one_line() -> None:
    def greet(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"SSH-2.0-OpenSSH_9.9\r\n")

    with listening(greet) as url:
        done = talon("connect", "codex", "--url", url)
    assert (done.exit_code, done.stderr) == (
        2,
        f"talon: --url {url}: no server answers (SSH-2.0-OpenSSH_9.9): start one with: talon serve\n",
    )


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
            done = talon("connect", "codex", "--url", url, "--key", KEY)
    assert (done.exit_code, seen) == (2, [])
    assert f"--url {url}: answers /v1/models with status 302" in done.stderr


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


@pytest.mark.parametrize("name", ["claude", "codex", "opencode", "aider", "litellm"])
def test_a_client_does_not_get_the_keys_of_other_providers(name: str, tmp_path: Path) -> None:
    told = install(tmp_path, name)
    kept = ("ANTHROPIC_API_KEY", "ANTHROPIC_CUSTOM_HEADERS", "CLAUDE_CODE_OAUTH_TOKEN", "CODEX_API_KEY")
    foreign = dict.fromkeys((*kept, "ANTHROPIC_AUTH_TOKEN", "OPENAI_API_KEY"), "sk-of-another")
    with listening(telling("coder")) as url:
        done = connect(tmp_path, name, "--url", url, "--key", KEY, **foreign, OTHER="stays")
    assert done.returncode == 3, done.stderr
    environment = json.loads(told.read_text())["environment"]
    assert "sk-of-another" not in environment.values() and environment["OTHER"] == "stays"
