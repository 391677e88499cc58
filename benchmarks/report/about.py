"""Records the machine and the configuration of a benchmark when it is run."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from pathlib import Path

from engine.config import Config
from engine.core.params import SamplingParams
from engine.core.processor import cores

ABOUT = "about.txt"


def write_about(
    folder: Path, config: Config, samplings: Sequence[SamplingParams], repeats: int, others: Sequence[str] = ()
) -> None:
    """Write `folder`/about.txt, a line for each of machine, versions and configuration. others: further packages that
    were measured, with their versions.
    """
    names = ("torch", "transformers", "numpy")
    versions = ", ".join([*(f"{name} {importlib.metadata.version(name)}" for name in names), *others])
    temperatures = ", ".join(f"{sampling.temperature:g}" for sampling in samplings)
    lines = [
        f"Machine: {machine()}",
        f"Versions: Python {platform.python_version()}, {versions}",
        f"Configuration: model {Path(config.model).name}, dtype {config.dtype}, weights {config.weights}, activations "
        f"{config.activations}, kv_type {config.verifier.kv_type}, device {config.device}, transport "
        f"{config.transport}{config.simulation}; answers of at most {samplings[0].max_tokens} tokens, T = "
        f"{temperatures}, seed {samplings[0].seed}, repeats {repeats}",
    ]
    (folder / ABOUT).write_text("\n".join(lines) + "\n", encoding="utf8")


def machine() -> str:
    """Return the processor, its cores, what multiplies, and the system."""
    return f"{_processor()}, {cores()} cores, {_instructions()}, {platform.system()}{_gpu()}"


def _instructions() -> str:
    """Return what multiplies on a CPU: it decides how much a further row costs."""
    from engine.kernels.gemm.matmul import units

    return next((unit.value for unit in units()), "no kernels of our own")


def _gpu() -> str:
    import torch

    return f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
