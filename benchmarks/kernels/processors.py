"""Lesser processors, as far as this one can stand for them: kernels are compiled in a process that knows fewer
instructions. A kernel's code depends on them, also where it needs none of them.
"""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple

import msgspec

from engine.core.child_environment import child_environment
from engine.core.errors import TalonError
from engine.kernels.simd import features

from .every import KernelCheck, check_kernels

_BEYOND_AVX512 = ("amx", "avx512bf16", "avx512fp16", "avx10", "avxvnni")
_BEYOND_AVX2 = ("amx", "avx512", "avx10", "evex")


class Processor(NamedTuple):
    """A lesser processor that this one can stand for. needs: an instruction set that this processor must have to stand
    for it. without: prefixes of the names of those that it does not have. llvm: what LLVM calls it.
    """

    name: str
    needs: str
    without: tuple[str, ...]
    llvm: str


PROCESSORS = (
    Processor("AVX512 and VNNI, no BF16", "avx512vnni", _BEYOND_AVX512, "cascadelake"),
    Processor("AVX2 and AVX-VNNI", "avxvnni", _BEYOND_AVX2, "alderlake"),
    Processor("AVX2", "avx2", (*_BEYOND_AVX2, "avxvnni"), "haswell"),
)


def environment_as(processor: Processor) -> dict[str, str] | None:
    """Return the environment of a process in which this processor stands for that one; None if it cannot."""
    known = features()
    if f"+{processor.needs}" not in known:
        return None
    wanted = [
        f"-{name[1:]}" if name[0] == "+" and name[1:].startswith(processor.without) else name for name in sorted(known)
    ]
    return child_environment() | {"NUMBA_CPU_NAME": processor.llvm, "NUMBA_CPU_FEATURES": ",".join(wanted)}


def check_as(processor: Processor, first: int = 0, step: int = 1) -> list[KernelCheck] | None:
    """Check the kernels that this processor runs when it stands for that one, or some of them (`check_kernels`); None
    if it cannot.
    """
    if (environment := environment_as(processor)) is None:
        return None
    command = [sys.executable, "-m", f"{__package__}.processors", str(first), str(step)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
        raise TalonError(f"kernels as on {processor.name}: {reason}; this is a defect of Talon, please report it")
    return msgspec.json.decode(done.stdout, type=list[KernelCheck])


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(check_kernels(*map(int, sys.argv[1:]))))
