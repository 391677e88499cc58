"""Runs engine and HTTP server in one event loop, from the first signal to the last answer."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from engine.api import Engine
from engine.config import Config
from engine.core.errors import ConfigError
from engine.server import traces
from engine.server.app import create_app
from engine.server.http.protocol import HttpProtocol
from engine.server.log import to_standard_error
from engine.server.serving import Serving
from engine.server.settings import Settings

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class Listening:
    """Where to listen. certificate, key: PEM files for TLS. drain_s: time for running answers at shutdown.
    keep_alive_s: how long a connection without requests stays open.
    """

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None
    drain_s: int = 30
    keep_alive_s: int = 75


async def run_server(config: Config, settings: Settings, where: Listening) -> None:
    """Serve until SIGTERM or Ctrl-C; then finish the running answers and close the engine."""
    to_standard_error()
    traces.check(settings.traces)
    check_certificate(where)
    _tell(f"loading {config.model}")
    with listen(where) as listener, _ended_by_sigterm():
        async with await Engine.start(config) as engine:
            serving = Serving(engine, settings)
            await serving.warm_up()
            server = _Server(_uvicorn(serving, where), serving)
            grammars = asyncio.create_task(serving.warm_up_grammars())
            try:
                await server.serve(sockets=[listener])
            finally:
                grammars.cancel()
                if serving.learning is not None:
                    await serving.learning.close()
            serving.traces.close()


def _tell(line: str) -> None:
    """Print a line for a person, if standard error is a terminal; the log is for programs."""
    if sys.stderr.isatty():
        print(f"talon: {line}", file=sys.stderr)


def listen(where: Listening) -> socket.socket:
    """Return the socket, bound before a model is loaded, so that most failures show at once."""
    family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((where.host, where.port))
    except OSError as error:
        listener.close()
        raise _no_listening(where.host, where.port, error) from None
    return listener


def _no_listening(host: str, port: int, error: OSError) -> ConfigError:
    taken = "; name another --port, 0 takes any that is free" if error.errno == errno.EADDRINUSE else ""
    return ConfigError(f"--host {host} --port {port}: cannot listen there: {error.strerror}{taken}")


def check_certificate(where: Listening) -> None:
    """Raise ConfigError for files that TLS cannot use, before a model is loaded."""
    if where.certificate is None or where.key is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(where.certificate, where.key)
    except OSError as error:  # SSLError is one of these
        raise ConfigError(f"--tls-cert {where.certificate}, --tls-key {where.key}: no such pair: {error}") from None


def _uvicorn(serving: Serving, where: Listening) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(serving),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        http=HttpProtocol,
        timeout_keep_alive=where.keep_alive_s,
        timeout_graceful_shutdown=where.drain_s,
        ssl_certfile=where.certificate,
        ssl_keyfile=where.key,
    )


class _Server(uvicorn.Server):
    """Announces its address, and drains when told to end; a second Ctrl-C does not wait."""

    def __init__(self, config: uvicorn.Config, serving: Serving):
        super().__init__(config)
        self.serving = serving

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets
        host, port = sockets[0].getsockname()[:2]
        try:
            await super().startup(sockets)
        except OSError as error:  # another server bound the address too, and began to listen first
            raise _no_listening(host, port, error) from None
        shown = f"[{host}]" if ":" in host else host
        url = f"{'https' if self.config.is_ssl else 'http'}://{shown}:{port}"
        settings = self.serving.settings
        self.serving.log.started(url, settings.model, self.serving.engine.target)
        _tell(f"{settings.model} answers at {url}; Ctrl-C ends it")
        if host not in _LOOPBACK and not settings.api_keys:
            self.serving.log.warn("no API keys: whoever reaches this address may use it; see --api-keys")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replace uvicorn's own handling, which would send the signal once more at the end, before the engine is
        closed.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = self.serving.draining = True


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """End the process on SIGTERM as on Ctrl-C while the model loads: workers and files are cleaned up."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    told = False

    def end() -> None:
        nonlocal told
        told = True
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, end)
    try:
        yield
    except asyncio.CancelledError:
        if not told:
            raise
        raise SystemExit(128 + signal.SIGTERM) from None
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
