"""Other processors, as far as this one can stand for them. For a lesser one, kernels are compiled in a process that
knows fewer instructions: their code depends on them, also where it needs none of them. For one that has more, those
instructions are modelled.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from engine.core.child_environment import child_environment
from engine.core.errors import TalonError
from engine.kernels.simd import features

from .every import KernelCheck, instructions_of_kernels
from .modelled import MODELLED

_AVX2 = ("avx", "avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512vnni")
_BEYOND_AVX512_BF16 = ("amx", "avx512fp16", "avx10", "avxvnni")
_BEYOND_AVX2 = ("amx", "avx512", "avx10", "evex")
_ANY = ("any", "AVX2")
_WHOLE = ("AVX512-VNNI", "AVX-VNNI", *_ANY)
_PAIRS = ("AVX512-BF16", *_WHOLE)


class Processor(NamedTuple):
    """A processor that this one can stand for. runs: what kernels may need to run there. has: the features that kernels
    ask for, all of which this processor must have if none of them is to be modelled. without: prefixes of the names of
    those that it does not have. llvm: what LLVM calls it.
    """

    name: str
    runs: tuple[str, ...]
    has: tuple[str, ...]
    without: tuple[str, ...]
    llvm: str


PROCESSORS = (
    Processor("AMX", ("AMX", *_PAIRS), (*_AVX512, "avx512bf16", "amx-tile", "amx-bf16"), (), "sapphirerapids"),
    Processor("AVX512, VNNI and BF16", _PAIRS, (*_AVX512, "avx512bf16"), _BEYOND_AVX512_BF16, "znver4"),
    Processor("AVX512 and VNNI, no BF16", _WHOLE, _AVX512, (*_BEYOND_AVX512_BF16, "avx512bf16"), "cascadelake"),
    Processor("AVX2 and AVX-VNNI", ("AVX-VNNI", *_ANY), (*_AVX2, "avxvnni"), _BEYOND_AVX2, "alderlake"),
    Processor("AVX2", _ANY, _AVX2, (*_BEYOND_AVX2, "avxvnni"), "haswell"),
)


def shares_of(able: Sequence[Processor]) -> dict[Processor, list[int]]:
    """Share all kernels out: each to one of the processors that run it, to all of these in turn. A processor that is
    modelled gets every ninth of its share, since models take long to compile.
    """
    shares: dict[Processor, list[int]] = {processor: [] for processor in able}
    for number, needed in enumerate(instructions_of_kernels()):
        if running := [processor for processor in able if needed in processor.runs]:
            shares[running[number % len(running)]].append(number)
    return {processor: share[:: 9 if is_modelled(processor) else 1] for processor, share in shares.items()}


def environment_as(processor: Processor) -> dict[str, str] | None:
    """Return the environment of a process in which this processor stands for that one; None if it is that one, or has
    not even AVX2.
    """
    known = features()
    wanted = [
        f"-{name[1:]}" if name[0] == "+" and name[1:].startswith(processor.without) else name for name in sorted(known)
    ]
    if not is_modelled(processor):
        numba = {"NUMBA_CPU_NAME": processor.llvm, "NUMBA_CPU_FEATURES": ",".join(wanted)}
        return None if set(wanted) == known else child_environment() | numba
    if "+avx2" not in known:
        return None
    # what runs once need not be fast, and takes half the time to compile
    return child_environment() | {MODELLED: ",".join(f"+{name}" for name in processor.has), "NUMBA_OPT": "0"}


def is_modelled(processor: Processor) -> bool:
    """Return whether some of its instructions must be modelled, since this processor does not have them."""
    return not {f"+{name}" for name in processor.has} <= features()


def check_as(processor: Processor, numbers: Sequence[int]) -> list[KernelCheck]:
    """Check kernels (`check_kernels`) while this processor stands for that one, as it must be able to."""
    environment = environment_as(processor)
    assert environment is not None
    command = [sys.executable, "-m", f"{__package__}.modelled", *map(str, numbers)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
        raise TalonError(f"kernels as on {processor.name}: {reason}; this is a defect of Talon, please report it")
    return msgspec.json.decode(done.stdout, type=list[KernelCheck])
