"""What a server of a file shows from outside: its start, second turns of a chat, its memory, and rounds with drafts of
the model's own head. Talon's or llama.cpp's.
"""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from http.client import HTTPResponse
from itertools import islice
from string import ascii_lowercase
from typing import Any

import msgspec

from engine.core.child_environment import child_environment
from engine.core.errors import ConfigError

from ..measure.memory import pss_mb

_START_S, _ANSWER_S, _STOP_S = 900.0, 900.0, 20.0
_WORD_TOKENS, _LETTERS = 6, 8  # a space, and letters in pairs and alone
_ANSWER, _ABORTED = 48, 24  # tokens of a whole answer, pieces of one that is cut off
_SHORT, _DRAFTED = 128, 64  # tokens of a prompt, which a head reads in the first round, and of its answer
DRAFTS = (1, 2, 3)
"""Tokens of the drafts of the model's own head."""


class SecondTurn(msgspec.Struct):
    """seconds: until the first token of the second turn; read: how many of its `tokens` were not cached."""

    seconds: float
    tokens: int
    read: int


class Served(msgspec.Struct):
    """start_s: of the file's first start, and of a later one. whole, aborted: second turns after an answer that ended,
    and after one that the client cut off and does not send back. memory_mb: PSS of all processes then.
    """

    start_s: tuple[float, float]
    whole: SecondTurn
    aborted: SecondTurn
    memory_mb: float


def serve(command: Sequence[str], tokens: int) -> Served:
    """Start a server twice, and chat with the second one. command: without the port; tokens: of a first turn."""
    with Server(command) as server:
        first_s = server.start_s
    with Server(command) as server:
        whole, aborted = server.whole_turn(tokens), server.aborted_turn(tokens)
        return Served((first_s, server.start_s), whole, aborted, server.memory_mb())


def round_ms(command_of: Callable[[int], Sequence[str]]) -> dict[int, float]:
    """Return the time of a round by the tokens of a draft. command_of: starts a server that drafts so many."""
    found: dict[int, float] = {}
    for drafts in DRAFTS:
        with Server(command_of(drafts)) as server:
            found[drafts] = server.round_ms()
    return found


class Server:
    """A server in a process of its own, at a free port."""

    def __init__(self, command: Sequence[str]):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._command, self._url = [*command, "--port", str(port)], f"http://127.0.0.1:{port}"
        self._model, self.start_s = "", 0.0

    def __enter__(self) -> Server:
        started, nowhere = time.perf_counter(), subprocess.DEVNULL
        self._process = subprocess.Popen(self._command, stdout=nowhere, stderr=nowhere, env=child_environment())
        try:
            while not self._ready():
                if self._process.poll() is not None or time.perf_counter() - started > _START_S:
                    raise ConfigError(f"the server did not start: try {' '.join(self._command)}")
                time.sleep(0.05)
        except BaseException:
            self.__exit__()
            raise
        self.start_s = time.perf_counter() - started
        with urllib.request.urlopen(f"{self._url}/v1/models", timeout=_STOP_S) as reply:
            self._model = json.load(reply)["data"][0]["id"]
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=5):
                return True
        except OSError:
            return False

    def whole_turn(self, tokens: int) -> SecondTurn:
        """Ask for a whole answer, and send one back with the next question: always the same, since random text is not
        read as the tokens that it was written in.
        """
        chat = [{"role": "user", "content": _words(tokens, seed=1)}]
        with self._ask(chat, _ANSWER) as reply:
            reply.read()
        return self._second([*chat, {"role": "assistant", "content": "nothing of the kind"}])

    def aborted_turn(self, tokens: int) -> SecondTurn:
        """Hang up in the middle of an answer, and ask something else."""
        chat = [{"role": "user", "content": _words(tokens, seed=2)}]
        with self._ask(chat, 20 * _ANSWER, stream=True) as reply:
            for _ in islice(filter(_has_text, reply), _ABORTED):
                pass
        time.sleep(1.0)  # until the server has noticed
        return self._second(chat)

    def round_ms(self) -> float:
        """Answer a short prompt, and return what a round took after the first: it gives a token, and those accepted."""
        chat = [{"role": "user", "content": _words(_SHORT, seed=3)}]
        with self._ask(chat, _DRAFTED, ignore_eos=True) as reply:
            timings = json.load(reply)["timings"]
        rounds = timings["predicted_n"] - 1 - timings["draft_n_accepted"]
        return float(timings["predicted_ms"] / max(1, rounds))

    def _second(self, chat: list[dict[str, str]]) -> SecondTurn:
        started = time.perf_counter()
        with self._ask([*chat, {"role": "user", "content": "and what happened then"}], 1) as reply:
            usage = json.load(reply)["usage"]
        seconds, cached = time.perf_counter() - started, (usage.get("prompt_tokens_details") or {})["cached_tokens"]
        return SecondTurn(seconds, usage["prompt_tokens"], usage["prompt_tokens"] - cached)

    def _ask(self, chat: list[dict[str, str]], max_tokens: int, **more: bool) -> HTTPResponse:
        body = {"model": self._model, "messages": chat, "max_tokens": max_tokens, "temperature": 0} | more
        request = urllib.request.Request(
            f"{self._url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        reply: HTTPResponse = urllib.request.urlopen(request, timeout=_ANSWER_S)
        return reply

    def memory_mb(self) -> float:
        """Return the proportional set size of the server and its children."""
        return pss_mb(self._process.pid)


def _words(tokens: int, seed: int) -> str:
    """Return random words of about so many tokens."""
    numbers = random.Random(seed)
    return " ".join("".join(numbers.choices(ascii_lowercase, k=_LETTERS)) for _ in range(tokens // _WORD_TOKENS))


def _has_text(line: bytes) -> bool:
    """Return whether a line of a stream carries a piece of an answer, or of its thoughts."""
    if not line.startswith(b"data: {"):
        return False
    choices: list[dict[str, Any]] = json.loads(line[len(b"data: ") :]).get("choices") or [{}]
    return any(value for key, value in choices[0].get("delta", {}).items() if key != "role")
