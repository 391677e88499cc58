"""`talon serve`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import anyio.to_thread
import typer

from engine import config as configuration
from engine.cli.command import MODELS_OWN, ConfigOption, SetOption, overrides, run
from engine.core.errors import ConfigError

KEYS_VARIABLE = "TALON_API_KEYS"


def serve(
    config: ConfigOption = configuration.DEMO,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 is every address.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one and says which.", min=0, max=65535)] = 8000,
    method: Annotated[str | None, typer.Option(help="Who drafts: none, pld, suffix, eagle3, hybrid, ...")] = None,
    model_name: Annotated[
        str | None, typer.Option("--served-model-name", help="What clients call the model.", show_default=MODELS_OWN)
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(help=f"File of API keys, one a line; or {KEYS_VARIABLE}, with commas.", show_default="no keys"),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, PEM: serve https.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The certificate's private key, PEM.")] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Pages of this origin may call; may be given again.", show_default="none")
    ] = None,
    max_body: Annotated[int, typer.Option(help="Longest body of a request, in bytes.", min=1024)] = 4 << 20,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(help="Longest prompt.", show_default="the context", min=1)
    ] = None,
    clamp_max_tokens: Annotated[
        bool, typer.Option(help="A max_tokens beyond the context means the rest of it, or is refused.")
    ] = True,
    max_choices: Annotated[int, typer.Option(help="Answers of one request: prompts times n.", min=1)] = 64,
    queue: Annotated[
        int | None, typer.Option(help="Answers under way or waiting; more get 429.", show_default="queue.size", min=1)
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder of prompts and answers that outlive a restart.", show_default="none")
    ] = None,
    learn: Annotated[
        bool, typer.Option("--learn", help="Learn to draft from each client's texts while there are no requests.")
    ] = False,
    learn_gb: Annotated[float, typer.Option(help="Of the disk for what is learned, at most.", min=0.001)] = 10.0,
    drain: Annotated[int, typer.Option(help="Seconds that SIGTERM leaves to answers under way.", min=0)] = 30,
    keep_alive: Annotated[int, typer.Option(help="Seconds that a connection without requests stays open.", min=1)] = 75,
    root_path: Annotated[
        str, typer.Option(help="Path under which a proxy serves this: /talon.", show_default="none")
    ] = "",
    tool_format: Annotated[
        str | None,
        typer.Option(help="How the model calls tools: hermes, llama, ...", show_default="as its chat template says"),
    ] = None,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Prompts and answers stand in the log.")] = False,
    traces: Annotated[
        str | None, typer.Option(help="Send OpenTelemetry spans: http://HOST:4318/v1/traces", show_default="none")
    ] = None,
    set_: SetOption = None,
) -> None:
    """Serve OpenAI's chat completions, responses and completions, and Anthropic's messages; a page at /.

    talon serve

    talon serve --method hybrid --config configs/smollm2.yaml --port 8001 --api-keys keys.txt
    """

    async def main() -> None:
        try:
            from engine.server.learning import learning_config
            from engine.server.run import Listening, run_server
            from engine.server.settings import Settings
        except ImportError as error:
            raise ConfigError(f"serve: {error.name} is missing: pip install 'talon-decoding[serve]'") from None
        own = {"queue.size": queue, "verifier.cache": None if cache is None else str(cache.expanduser().absolute())}
        given = overrides(set_, method=method, **own)
        engine_config = configuration.load(config, given | {"queue.full": "refuse"})
        if learn:
            engine_config = await anyio.to_thread.run_sync(learning_config, engine_config)
        settings = Settings(
            model=model_name or short_name(engine_config.model),
            api_keys=read_keys(api_keys),
            cors_origins=tuple(cors_origin or ()),
            max_body_bytes=max_body,
            max_prompt_tokens=max_prompt_tokens,
            clamp_max_tokens=clamp_max_tokens,
            max_choices=max_choices,
            root_path=checked_root_path(root_path),
            tool_format=tool_format,
            learn_gb=learn_gb if learn else None,
            log_prompts=log_prompts,
            traces=traces,
        )
        if (tls_cert is None) != (tls_key is None):
            raise ConfigError("--tls-cert, --tls-key: give both or neither")
        await run_server(engine_config, settings, Listening(host, port, tls_cert, tls_key, drain, keep_alive))

    run(main())


def read_keys(file: Path | None) -> tuple[str, ...]:
    """Return the keys of the environment and of the file. Raises ConfigError where one of them is given and holds no
    key.
    """
    given = os.environ.get(KEYS_VARIABLE)
    keys = () if given is None else tuple(key.strip() for key in given.split(",") if key.strip())
    if given is not None and not keys:
        raise ConfigError(f"{KEYS_VARIABLE}: is set and holds no key; write KEY,KEY, or unset it to let everybody in")
    return keys if file is None else keys + _keys_in(file)


def _keys_in(file: Path) -> tuple[str, ...]:
    """Return a file's keys; blank lines and lines that begin with # are ignored."""
    try:
        lines = [line.strip() for line in file.read_text("utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-keys {file}: cannot be read: {error}") from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"--api-keys {file}: holds no key, and would let everybody in; write one a line")
    return keys


def checked_root_path(path: str) -> str:
    """Return the path without its last slash; ConfigError for an invalid one."""
    if path and not path.startswith("/"):
        raise ConfigError(f"--root-path {path}: is no path; begin it with a slash, for example /talon")
    return path.rstrip("/")


def short_name(model: str) -> str:
    """Return a hub id or a catalogue name as it is; of a path its last part."""
    return Path(model).resolve().name if Path(model).exists() else model
