"""`talon check --kernels`: what it says of kernels that agree, differ, cannot be compiled or do not run here."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from benchmarks.kernels import attention, every, processors, products
from benchmarks.kernels.every import KernelCheck, _Case
from benchmarks.kernels.modelled import MODELLED
from benchmarks.kernels.processors import PROCESSORS, Processor, check_as, environment_as, is_modelled
from engine.core.errors import TalonError
from engine.kernels.attention.every_kernel import every_attention_kernel
from engine.kernels.gemm.matmul import Matmul, units
from tests.command import talon

LANES = next(kernel for kernel in every_attention_kernel() if kernel.name == "lanes")


def test_what_is_right_agrees_with_its_definition() -> None:
    """All kernels are compared in tests/engine/kernels, and by the command itself, which CI runs."""
    assert attention.difference(LANES) == ""
    for unit in units()[:1]:
        assert every._numbers(unit, torch.bfloat16) == every._codes(unit, "Q4_K") == ""


def _shifted(found: Tensor) -> Tensor:
    return found * 1.001


def _leaking(found: Tensor) -> Tensor:
    """The tree's results, if one of them is not finite, with its neighbour's spoiled too."""
    if not found.isfinite().all():
        found[0] = torch.nan
    return found


def _dependent(found: Tensor) -> Tensor:
    found[0] *= 1 + 1e-6 * len(found)
    return found


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (_shifted, "its error is 0.001"),
        (_leaking, "an infinity reaches a row that does not see it"),
        (torch.nan_to_num, "an infinity is hidden from a row that sees it"),
        (_dependent, "a row's bits depend on the rows beside it"),
    ],
)
def test_attention_that_is_wrong_is_told(fault: Any, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention._attended
    monkeypatch.setattr(attention, "_attended", lambda *given, **more: fault(right(*given, **more)))
    assert attention.difference(LANES) == told


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (_shifted, "its error is 0.001"),
        (lambda out: out + out.isnan().any() * 1e-3, "an infinity or NaN reaches another row"),
        (torch.nan_to_num, "an infinity or NaN is hidden"),
        (lambda out: out * (1 + 1e-7 * len(out)), "a row's bits depend on the rows beside it"),
    ],
)
@pytest.mark.skipif(not units(torch.float32), reason="this processor has none of our products")
def test_a_product_that_is_wrong_is_told(fault: Any, told: str) -> None:
    weight = torch.randn(products.OUTPUTS, products.INPUTS)

    class Wrong(Matmul):
        def __call__(self, x: Tensor) -> Tensor:
            out: Tensor = fault(super().__call__(x))
            return out

    found = products.difference(Wrong(weight), weight, torch.float32)
    assert found == told


def _broken() -> str:
    raise IndexError("mask values need to be in range(0, 32)\nand more")


CASES = [
    _Case("one", "AVX2", True, lambda: ""),
    _Case("two", "AMX", False, _broken),
    _Case("three", "AVX2", True, lambda: "its error is 0.5"),
    _Case("four", "AVX2", True, _broken),
]


@pytest.mark.parametrize(("cases", "code"), [(CASES[:2], 0), (CASES, 1)])
def test_the_command_lists_what_ran_and_what_did_not_and_fails_if_a_kernel_differs(
    cases: list[_Case], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(every, "_cases", lambda: cases)
    monkeypatch.setattr(processors, "PROCESSORS", PROCESSORS[:1])
    monkeypatch.setattr(processors, "environment_as", lambda processor: None)
    done = talon("check", "--kernels")
    assert done.exit_code == code
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    assert "one AVX2 agrees" in lines and "two AMX not run: this processor does not have these instructions" in lines
    assert f"on this processor: {len(cases) - 1} of {len(cases)} kernels ran here, {2 * code} differ" in lines
    assert any(line.endswith("not run, this processor is one or cannot stand for it") for line in lines)
    if code:
        assert "three AVX2 its error is 0.5" in lines
        assert "four AVX2 cannot be compiled (mask values need to be in range(0, 32))" in lines


def test_kernels_that_are_spread_are_each_checked_once_as_on_a_processor_that_runs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Processor, list[int]]] = []

    def note(*share: Any) -> list[KernelCheck]:
        asked.append(share)
        return []

    monkeypatch.setattr(every, "_cases", lambda: CASES)
    monkeypatch.setattr(processors, "environment_as", lambda one: None if one is PROCESSORS[1] else {})
    monkeypatch.setattr(processors, "check_as", note)
    monkeypatch.setattr(processors, "is_modelled", lambda processor: False)
    talon("check", "--kernels", "--spread")
    shares = dict(asked)
    assert 1 in shares[PROCESSORS[0]]  # it alone has AMX
    assert sorted(number for share in shares.values() for number in share) == [0, 1, 2, 3]
    asked.clear()
    talon("check", "--kernels")
    assert dict(asked) == {one: [0, 1, 2, 3] for one in PROCESSORS if one is not PROCESSORS[1]}


def test_every_kernel_runs_on_one_of_the_processors() -> None:
    needed = set(every.instructions_of_kernels())
    assert needed == {instructions for processor in PROCESSORS for instructions in processor.runs}


KNOWN = frozenset(["+amx-tile", "+avx", "+avx2", "+fma", "+f16c", "+avx512f", "+avx512vnni", "-avx512bf16"])


def test_a_lesser_processor_is_stood_for_by_a_process_that_knows_fewer_instructions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks, given = [KernelCheck("one", "AVX2", ""), KernelCheck("two", "AMX", None)], dict[str, str]()

    def run(command: list[str], env: dict[str, str], **_: object) -> SimpleNamespace:
        given.update(env)
        assert command[1:] == ["-m", "benchmarks.kernels.modelled", "1", "5"]
        return SimpleNamespace(returncode=0, stdout=msgspec.json.encode(checks).decode(), stderr="")

    monkeypatch.setattr(processors, "features", lambda: KNOWN)
    monkeypatch.setattr(subprocess, "run", run)
    assert check_as(PROCESSORS[-1], [1, 5]) == checks
    known = given["NUMBA_CPU_FEATURES"].split(",")
    assert {name[1:] for name in known} == {name[1:] for name in KNOWN}
    assert {name for name in known if name[0] == "+"} == {"+avx", "+avx2", "+fma", "+f16c"}
    failed = SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nIndexError: mask")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(TalonError, match="kernels as on AVX2: IndexError: mask; this is a defect"):
        check_as(PROCESSORS[-1], [])


def test_a_greater_processor_s_instructions_are_modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "features", lambda: KNOWN)
    given = environment_as(PROCESSORS[0])
    assert given is not None and "NUMBA_CPU_FEATURES" not in given and is_modelled(PROCESSORS[0])
    assert set(given[MODELLED].split(",")) > {"+amx-tile", "+amx-bf16", "+avx512bf16", "+avx2"}


def test_a_processor_does_not_stand_for_itself_nor_without_avx2_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "features", lambda: frozenset(f"+{name}" for name in PROCESSORS[-1].has))
    assert environment_as(PROCESSORS[-1]) is None
    monkeypatch.setattr(processors, "features", lambda: frozenset(["+sse2"]))
    assert all(environment_as(one) is None for one in PROCESSORS)
