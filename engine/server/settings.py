"""The options of `talon serve`, in addition to the engine's own configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The options of one server.

    model: the name that clients use. api_keys: any of them grants access; empty: everyone has access. cors_origins:
    pages of these origins may call; empty: no page of another origin. max_body_bytes: of a request. max_prompt_tokens:
    None: what the context holds. clamp_max_tokens: a max_tokens beyond the rest of the context means that rest; False:
    it is refused. max_choices: maximum answers of one request, over all of its prompts. root_path: where a proxy serves
    this, such as /talon; it may remove that from the paths, or not. log_prompts: put prompts and answers into the log.
    tool_format: how calls of tools are written, None: as the chat template says. learn_gb: learn from texts while there
    are no requests, in so many gigabytes of the disk; None: do not. traces: an OTLP endpoint for
    OpenTelemetry, such as http://localhost:4318/v1/traces.
    """

    model: str
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 << 20
    max_prompt_tokens: int | None = None
    clamp_max_tokens: bool = True
    max_choices: int = 64
    root_path: str = ""
    log_prompts: bool = False
    tool_format: str | None = None
    learn_gb: float | None = None
    traces: str | None = None
