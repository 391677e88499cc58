"""Clients that work with this server as they are installed, and what each has to be told."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Template

_KEYS = (
    *("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_CUSTOM_HEADERS", "CLAUDE_CODE_OAUTH_TOKEN"),
    *("CODEX_API_KEY", "OPENAI_API_KEY"),
)
"""Variables that may hold a person's key of another provider. Claude Code, for one, sends every key that it finds."""
_CLOUDS = ("CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY")
"""Variables that make Claude Code ask a cloud provider in place of ANTHROPIC_BASE_URL."""


@dataclass(frozen=True)
class ServedModel:
    """Where clients find a model. url: of the server, without a path; context: in tokens."""

    url: str
    key: str
    model: str
    context: int

    @property
    def values(self) -> dict[str, str]:
        """The values that a template may name. answer: tokens that a client leaves to an answer."""
        answer = min(32_000, max(1024, self.context // 8))
        own = {"url": self.url, "key": self.key, "model": self.model}
        return own | {"context": str(self.context), "answer": str(answer)}


@dataclass(frozen=True)
class Agent:
    """A client. environment, command: what starts it, "" if people start it otherwise. place: where `settings` belong.
    All of them are templates. install: how it is installed. own_tokens: about how many tokens of its own a prompt
    begins with.
    """

    name: str
    install: str
    environment: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    place: str = ""
    settings: str = ""
    own_tokens: int = 0

    def variables(self, server: ServedModel) -> dict[str, str]:
        """Return the environment that the client reads."""
        return {name: _filled(text, server) for name, text in self.environment.items()}

    @property
    def removes(self) -> list[str]:
        """Variables that the client must not find, so that this server gets no other provider's key and no other
        provider gets this server's requests.
        """
        return [name for name in (*_KEYS, *_CLOUDS) if name not in self.environment] if self.command else []

    def started_by(self, server: ServedModel) -> list[str]:
        """Return the command that starts the client."""
        return [_filled(text, server) for text in self.command]

    def lines(self, server: ServedModel) -> list[str]:
        """Return what a person types or pastes, behind a comment with the client's installation."""
        heading = [f"# {'; '.join(filter(None, (self.install, self.place)))}"]
        told = [shlex.join(["unset", *self.removes])] if self.removes else []
        told += [f"export {name}={shlex.quote(value)}" for name, value in self.variables(server).items()]
        told += [shlex.join(self.started_by(server))] if self.command else []
        return heading + told + _filled(self.settings, server).splitlines()


def _filled(template: str, server: ServedModel) -> str:
    """Fill a template in. A template with quotation marks is JSON, TOML, YAML or code, and keeps each value within
    them.
    """
    quoted = '"' in template
    return Template(template).substitute(
        {name: _escaped(value) if quoted else value for name, value in server.values.items()}
    )


def _escaped(value: str) -> str:
    """Escape a value for double quotation marks, and braces too: opencode and Continue replace `{env:X}` and
    `{{ secrets.X }}`. Other characters stay, because TOML does not take JSON's surrogates.
    """
    return json.dumps(value, ensure_ascii=False)[1:-1].replace("{", "\\u007b")


_OPENAI_BASE = {"OPENAI_API_BASE": "$url/v1", "OPENAI_API_KEY": "$key"}
_OPENAI = {"OPENAI_BASE_URL": "$url/v1", "OPENAI_API_KEY": "$key"}
_PROVIDER = (
    'model_providers.talon={name="Talon", base_url="$url/v1", env_key="TALON_API_KEY", wire_api="responses", '
    "stream_idle_timeout_ms=3600000}"
)
_OPENCODE = (
    '{"model": "talon/$model", "provider": {"talon": {"npm": "@ai-sdk/openai-compatible", '
    '"options": {"baseURL": "$url/v1", "apiKey": "$key"}, '
    '"models": {"$model": {"limit": {"context": $context, "output": $answer}}}}}}'
)
AGENTS = {
    agent.name: agent
    for agent in (
        Agent(
            "claude",
            "npm install -g @anthropic-ai/claude-code",
            environment={
                "ANTHROPIC_BASE_URL": "$url",
                "ANTHROPIC_AUTH_TOKEN": "$key",
                "ANTHROPIC_MODEL": "$model",
                "ANTHROPIC_DEFAULT_OPUS_MODEL": "$model",
                "ANTHROPIC_DEFAULT_SONNET_MODEL": "$model",
                "ANTHROPIC_DEFAULT_HAIKU_MODEL": "$model",
                "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "$context",
                "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "$answer",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "CLAUDE_STREAM_IDLE_TIMEOUT_MS": "3600000",  # else it leaves a prompt that takes five minutes
                "API_TIMEOUT_MS": "3600000",
            },
            command=("claude",),
            own_tokens=18_800,
        ),
        Agent(
            "codex",
            "npm install -g @openai/codex",
            environment={"TALON_API_KEY": "$key"},
            command=(
                *("codex", "-c", 'model_provider="talon"', "-c", 'model="$model"'),
                *("-c", "model_context_window=$context", "-c", _PROVIDER),
            ),
            own_tokens=8_600,
        ),
        Agent(
            "opencode",
            "npm install -g opencode-ai",
            environment={"OPENCODE_CONFIG_CONTENT": _OPENCODE},
            command=("opencode",),
        ),
        Agent(
            "aider",
            "pip install aider-chat",
            environment=_OPENAI_BASE,
            command=("aider", "--model", "openai/$model"),
        ),
        Agent(
            "llm",
            "pip install llm",
            place="extra-openai-models.yaml in the folder of: llm logs path",
            settings='- {model_id: talon, model_name: "$model", api_base: "$url/v1", supports_tools: true}',
        ),
        Agent(
            "continue",
            "npm install -g @continuedev/cli",
            place="~/.continue/config.yaml, below models",
            settings='- {name: Talon, provider: openai, model: "$model", apiBase: "$url/v1", apiKey: "$key"}',
        ),
        Agent("openai-agents", "pip install openai-agents", environment=_OPENAI),
        Agent(
            "pydantic-ai",
            "pip install pydantic-ai",
            environment=_OPENAI,
            settings='agent = Agent("openai-chat:$model")',
        ),
        Agent(
            "langgraph",
            "pip install langgraph langchain-openai",
            settings='model = ChatOpenAI(model="$model", base_url="$url/v1", api_key="$key")',
        ),
        Agent(
            "smolagents",
            "pip install 'smolagents[openai]'",
            settings='model = OpenAIServerModel(model_id="$model", api_base="$url/v1", api_key="$key")',
        ),
        Agent(
            "litellm",
            "pip install 'litellm[proxy]'",
            environment=_OPENAI_BASE | {"LITELLM_MASTER_KEY": "$key"},  # without one it does not start
            command=("litellm", "--model", "openai/$model", "--host", "127.0.0.1"),
        ),
        Agent(
            "ai-sdk",
            "npm install ai @ai-sdk/openai-compatible",
            settings='const talon = createOpenAICompatible({ name: "talon", baseURL: "$url/v1", apiKey: "$key" });\n'
            'const model = talon("$model");',
        ),
    )
}
