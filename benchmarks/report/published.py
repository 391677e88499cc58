"""The processors of docs/benchmarks.md, and which of them a machine is most like."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kernels.gemm.matmul import Unit


@dataclass(frozen=True)
class PublishedMachine:
    """name: of its section in docs/benchmarks.md; gb_per_s: how fast it reads memory."""

    name: str
    unit: Unit
    cores: int
    gb_per_s: float


PUBLISHED = (
    PublishedMachine("Intel Xeon with AMX", Unit.AMX, 2, 28),
    PublishedMachine("AMD EPYC with AVX512-BF16", Unit.VECTORS, 2, 43),
    PublishedMachine("AMD EPYC with AVX2", Unit.FMA, 2, 35),
)


def most_like(unit: Unit, cores: int, gb_per_s: float) -> str:
    """Say which published figures a machine's own are to be compared with, and what differs. unit: the instructions
    that multiply here, which decide what a further row costs.
    """
    [other] = [machine for machine in PUBLISHED if machine.unit is unit]
    return (
        f'This machine ({cores} cores, reading {gb_per_s:.0f} GB/s) multiplies as "{other.name}" in docs/benchmarks.md '
        f"does, which has {other.cores} cores, reading {other.gb_per_s:.0f} GB/s. A plain token takes as long as "
        "reading the model's weights."
    )
