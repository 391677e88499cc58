"""Functions that are compiled into each other from several files, and numba's cache."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from numba import njit
from numba.core import caching

from engine.kernels import jit_cache, simd

ROOT = Path(jit_cache.__file__).parents[2]
INNER = """
from numba import njit

@njit
def inner(x):
    return x + {}
"""
OUTER = """
from numba import njit
from drafters.inner import inner
from engine.kernels.jit_cache import versioned

@njit(cache=True)
@versioned
def outer(x):
    return inner(x)

print(outer(1), sum(outer.stats.cache_hits.values()))
"""


def package(root: Path, files: dict[str, str]) -> None:
    """Write packages of our names that have these files and the cache of kernels."""
    for folder in ("engine", "engine/kernels", "drafters"):
        (root / folder).mkdir()
        (root / folder / "__init__.py").touch()
    shutil.copy(jit_cache.__file__, root / "engine" / "kernels")
    for name, source in files.items():
        (root / name).write_text(source)


def run(root: Path, module: str = "engine.outer") -> str:
    """What a fresh process prints that imports the module."""
    command = [sys.executable, "-c", f"import {module}"]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}  # bytecode is told by second and size, which stay
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    return done.stdout + done.stderr


def test_a_function_is_compiled_again_when_one_of_another_package_has_changed(tmp_path: Path) -> None:
    package(tmp_path, {"engine/outer.py": OUTER})

    def changed(added: int, source: str = INNER) -> str:
        (tmp_path / "drafters" / "inner.py").write_text(source.format(added))
        return run(tmp_path)

    assert [changed(1), changed(1), changed(2), changed(2)] == ["2 0\n", "2 1\n", "3 0\n", "3 1\n"]
    for number, decorator in enumerate(("kernel", "subroutine", "cached_njit")):
        (tmp_path / "engine" / "ours.py").write_text(f"from numba import njit as {decorator}\n")
        by_ours = INNER.replace("from numba import njit", f"from engine.ours import {decorator}")
        by_ours, first = by_ours.replace("@njit", f"@{decorator}"), 4 + 2 * number
        found = [changed(first, by_ours), changed(first + 1, by_ours)]
        assert found == [f"{first + 1} 0\n", f"{first + 2} 0\n"], "also by a decorator of our own"


def test_one_decorator_compiles_and_keeps_by_the_version_of_the_sources(tmp_path: Path) -> None:
    by_one = OUTER.replace("import versioned", "import cached_njit")
    by_one = by_one.replace("@njit(cache=True)\n@versioned", "@cached_njit")
    package(tmp_path, {"engine/outer.py": by_one, "drafters/inner.py": INNER.format(1)})
    assert [run(tmp_path), run(tmp_path)] == ["2 0\n", "2 1\n"]
    (tmp_path / "drafters" / "inner.py").write_text(INNER.format(2))
    assert run(tmp_path) == "3 0\n"


def test_only_a_change_of_what_a_kernel_imports_directly_or_not_compiles_it_again(tmp_path: Path) -> None:
    inner = "from numba import njit\nfrom drafters import deep\n\n@njit\ndef inner(x):\n    return deep.deep(x)\n"
    deep, unused = INNER.replace("inner", "deep"), "import numba  # {}\n"
    files = {"engine/outer.py": OUTER, "drafters/inner.py": inner, "drafters/deep.py": deep.format(1)}
    package(tmp_path, files | {"engine/unused.py": unused.format(1)})
    assert [run(tmp_path), run(tmp_path)] == ["2 0\n", "2 1\n"]
    (tmp_path / "engine" / "unused.py").write_text(unused.format(2))
    (tmp_path / "drafters" / "new.py").write_text(unused.format(3))
    assert run(tmp_path) == "2 1\n"
    (tmp_path / "drafters" / "deep.py").write_text(deep.format(7))
    assert run(tmp_path) == "8 0\n"
    (tmp_path / "drafters" / "inner.py").write_text(inner.replace("deep.deep(x)", "deep.deep(x) * 2"))
    assert run(tmp_path) == "16 0\n"


def test_a_constant_that_a_kernel_reads_compiles_it_again_and_what_else_is_beside_it_does_not(tmp_path: Path) -> None:
    inner = "from numba import njit\nfrom drafters.sizes import SIZE as _N, size\nfrom drafters.names import name\n"
    inner += "\n@njit\ndef inner(x):\n    return x + _N\n"
    sizes = "from drafters.base import BASE\n\nSIZE = 2 * BASE\n\ndef size():\n    pass\n"
    files = {"drafters/inner.py": inner, "drafters/sizes.py": sizes, "drafters/base.py": "BASE = 1\n"}
    package(tmp_path, files | {"engine/outer.py": OUTER, "drafters/names.py": "def name():\n    pass\n"})
    assert [run(tmp_path), run(tmp_path)] == ["3 0\n", "3 1\n"]
    (tmp_path / "drafters" / "base.py").write_text("BASE = 2\n")
    assert run(tmp_path) == "5 0\n", "a constant of a constant"
    (tmp_path / "drafters" / "sizes.py").write_text(sizes.replace("2 *", "3 *"))
    assert run(tmp_path) == "7 0\n"
    (tmp_path / "drafters" / "names.py").write_text("def name():\n    return 1\n")
    assert run(tmp_path) == "7 1\n"
    by_module = inner.replace("drafters.sizes import SIZE as _N, size", "drafters import sizes")
    (tmp_path / "drafters" / "inner.py").write_text(by_module.replace("_N", "sizes.SIZE"))
    assert run(tmp_path) == "7 0\n"
    (tmp_path / "drafters" / "sizes.py").write_text(sizes)
    assert run(tmp_path) == "5 0\n", "a constant that is read with its module"


EMITTED = """
from drafters.emitted import added
from numba import njit, types
from numba.extending import intrinsic

@intrinsic
def _inner(context, x):
    return types.int64(types.int64), lambda context, builder, signature, args: added(builder, args[0])

@njit
def inner(x):
    return _inner(x)
"""


def test_a_change_of_instructions_that_a_file_emits_without_numba_compiles_a_kernel_again(tmp_path: Path) -> None:
    package(tmp_path, {"engine/outer.py": OUTER, "drafters/inner.py": EMITTED})
    emitted = "from llvmlite import ir\n\ndef added(builder, x):\n    return builder.add(x, ir.IntType(64)({}))\n"
    for added, told in ((1, "2 0\n"), (1, "2 1\n"), (5, "6 0\n")):
        (tmp_path / "drafters" / "emitted.py").write_text(emitted.format(added))
        assert run(tmp_path) == told


LONG = "\n        ".join(["x = x * 3 % 1_000_003 ^ x + 1"] * 40)
CLOSURES = f"""
import sys
from numba import njit
from engine.kernels.jit_cache import versioned

def made(inner):
    @njit
    def closure(x):
        {LONG}
        return inner(x) + inner(x + 1)  # too long to become a part of its callers

    return closure

def summed(factor):
    @njit
    def added(x):
        {LONG}
        return x + factor

    return added

one, two = made(summed(1)), made(summed(2))

@njit(cache=True)
@versioned
def first(x):
    return one(x) + one(x + 1)

@njit(cache=True)
@versioned
def second(x):
    return two(x) + two(x + 1)

def told(kernel, closure):
    right = kernel(1) == closure.py_func(1) + closure.py_func(2)
    print("right" if right else "wrong", sum(kernel.stats.cache_hits.values()))
"""
FORKED = """
import importlib, os, sys
import engine.kernels.jit_cache

for module in ("engine.former", "engine.later"):
    if os.fork() == 0:
        importlib.import_module(module)
        sys.exit()
    os.wait()
"""


def test_a_kernel_that_is_loaded_does_not_call_another_closure_that_was_compiled_here(tmp_path: Path) -> None:
    """Both have one name, and are among the first functions that a process compiles, or one that was forked."""
    files = {"outer": CLOSURES, "forked": FORKED}
    for name, told in (("former", "told(second, two)"), ("later", "told(first, one)\ntold(second, two)")):
        files[name] = f"from engine.outer import *\n{told}\n"
    package(tmp_path, {f"engine/{name}.py": source for name, source in files.items()})
    expected = "right 0\nright 0\nright 1\n"
    assert run(tmp_path, "engine.former") + run(tmp_path, "engine.later") == expected
    for kept in tmp_path.rglob("*.nb[ic]"):
        kept.unlink()
    assert run(tmp_path, "engine.forked") == expected


def test_the_size_of_a_group_of_codes_is_part_of_its_readers_key() -> None:
    assert "engine.core.kv_shape" in jit_cache._read_at_compile_time("engine.kernels.attention.finite_blocks")


def test_the_modules_of_functions_that_a_kernel_was_handed_are_its_own() -> None:
    """A kernel's maker need not import what it is handed."""

    def made(inner: Any) -> Any:
        def kernel(x: int) -> Any:
            return inner[0](x)

        return kernel

    handed = jit_cache._homes(made((njit(made(simd.load)), 7)), set())
    assert set(handed) == {__name__, "engine.kernels.simd"}


@pytest.mark.parametrize("module", ["engine.kernels.attention.tile_attention", "engine.sampling.gumbel_max"])
def test_all_that_python_loads_for_a_module_of_kernels_is_reached(module: str) -> None:
    command = f"import sys, {module}; print(*sys.modules)"
    names = subprocess.check_output([sys.executable, "-c", command], text=True, cwd=ROOT).split()
    reached = jit_cache._reached([module], jit_cache._imported)
    compiled = {name for name in names if jit_cache._is_compiled(name)}
    assert len(compiled) > 2 and compiled <= reached


def test_every_function_in_the_cache_is_versioned() -> None:
    files = [file for package in jit_cache._PACKAGES for file in (ROOT / package).rglob("*.py")]
    cache = r"(?:njit|cfunc)\(.*cache=True.*\n?.*|@cached_njit\b"
    cached = [found for file in files for found in re.findall(cache, file.read_text())]
    assert len(cached) > 10
    assert [found for found in cached if "versioned" not in found and found != "@cached_njit"] == []


def test_the_first_compilation_is_told_once_and_what_the_cache_holds_is_none(tmp_path: Path) -> None:
    source = f"""
import sys
from numba import njit
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from engine.kernels.jit_cache import on_first_compilation
on_first_compilation(lambda: print("compiles"))

@njit(cache=True)
def doubled(x):
    return 2 * x

print(doubled(1), doubled(1.5))
"""
    (tmp_path / "kernels.py").write_text(source)
    said = [subprocess.check_output([sys.executable, "kernels.py"], cwd=tmp_path, text=True) for _ in range(2)]
    assert said == ["compiles\n2 3.0\n", "2 3.0\n"]


def files_in(folder: Path) -> Any:
    """numba's files of one function there."""
    return caching.IndexDataCacheFile(str(folder), "kernel", "version of its source")


def test_writers_at_once_give_no_two_functions_one_file(tmp_path: Path) -> None:
    def keep(key: int) -> None:
        files_in(tmp_path).save(key, f"code of {key}")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(keep, range(64)))
    assert [files_in(tmp_path).load(key) for key in range(64)] == [f"code of {key}" for key in range(64)]


def test_a_full_disk_costs_the_cache_alone_and_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        for key in range(2):
            files_in(tmp_path).save(key, "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    told = capsys.readouterr().err
    assert told == f"talon: {tmp_path}: compiled kernels cannot be kept (File too large): each start compiles them\n"
    assert [path.name for path in tmp_path.iterdir()] == ["talon.lock"]
    assert files_in(tmp_path).load(0) is None
    files_in(tmp_path).save(0, "code")
    assert files_in(tmp_path).load(0) == "code"


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize("parts", [1, 2])
def test_what_a_power_cut_has_left_is_compiled_again(tmp_path: Path, ending: str, parts: int) -> None:
    files_in(tmp_path).save(1, "code")
    [file] = tmp_path.glob(f"*.{ending}")
    os.truncate(file, file.stat().st_size // 2 * (parts - 1))
    assert files_in(tmp_path).load(1) is None
    files_in(tmp_path).save(1, "code")
    assert files_in(tmp_path).load(1) == "code"


def test_a_function_is_compiled_though_no_folder_can_keep_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = open

    def read_only(file: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
        if "w" in mode:
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(file, mode, *more, **options)

    monkeypatch.setattr("tempfile.TemporaryFile", lambda dir: read_only(dir, "w"))  # by which numba tries folders
    monkeypatch.setattr("builtins.open", read_only)

    @njit(cache=True)
    def doubled(x: int) -> int:
        return 2 * x

    assert doubled(4) == 8
    assert "compiled kernels cannot be kept (Read-only file system)" in capsys.readouterr().err
