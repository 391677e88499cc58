"""Compiled functions in numba's cache on disk.

The cache notices changes only of the file that defines a function. A function of another file that is compiled into it
would stay there as it was, also after an update. So the name in the cache has the checksum of all files that it can be
in: those that the function's file imports, directly or not, and those of functions that were handed to it, as far as
numba compiles anything of them: they import it or llvmlite, or decorate with one of our own decorators, or such a file
reads a constant of theirs, which is compiled as the number that it was. A change of any other file compiles nothing
again.

Two processes that compile at once would give two functions one file: numba reads the index, chooses a name that is
free, and writes both, and closures of one function share an index. So writers take turns here. Whatever else fails
(a full disk, a file that a power cut has emptied, a folder that is read only) costs the cache alone.

numba tells functions of one name, such as two closures of one function, apart by numbers, which begin at 1 in every
process. Where one closure is compiled and another one, which another process gave the same number, is then loaded, the
linker takes the first for both, and a kernel computes something else. So numbers begin anywhere here.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from itertools import count
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar
from zlib import crc32

import llvmlite.binding as llvm
from filelock import FileLock
from numba import njit
from numba.core import bytecode, caching, event

Given = ParamSpec("Given")
Result = TypeVar("Result")

_PACKAGES = ("engine", "drafters", "retrieval_index")
_ROOT = Path(__file__).parents[2]
_IMPORT = re.compile(
    rb"^[ \t]*(?:from|import) +((?:%s)[\w.]*)(?: +import +(\([^)]*\)|[^\n#]*))?"
    % b"|".join(map(str.encode, _PACKAGES)),
    re.MULTILINE,
)
_COMPILED = re.compile(rb"numba|llvmlite|^[ \t]*@(?:kernel|subroutine|cached_njit)\b", re.MULTILINE)
_CONSTANT = re.compile(rb"\b_?[A-Z][A-Z0-9_]+\b")
_TOLD = set[str]()  # why kernels cannot be kept


def versioned(work: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator, below numba's: names the function by the version of the sources that it is compiled of."""
    work.__qualname__ += f"_{_version_of(frozenset(_homes(work, set()))):x}"
    return work


def cached_njit(work: Callable[Given, Result]) -> Callable[Given, Result]:
    """Decorator: compiles a function that releases the GIL, and keeps it in the cache by the version of its sources."""
    compiled: Callable[Given, Result] = njit(cache=True, nogil=True)(versioned(work))
    return compiled


def _homes(part: Any, seen: set[int]) -> Iterator[str]:
    """Yield the modules of a function, and of what it and its parts have been handed by the functions around them."""
    if id(part) in seen or isinstance(part, ModuleType):
        return
    seen.add(id(part))
    # attributes of numba's functions, its intrinsics, and Python's decorators
    for wrapped in ("py_func", "_defn", "__wrapped__"):
        if (inner := getattr(part, wrapped, None)) is not None:
            yield from _homes(inner, seen)
    if isinstance(part, FunctionType):
        yield part.__module__
        for cell in part.__closure__ or ():
            with suppress(ValueError):  # the name is given a value later
                yield from _homes(cell.cell_contents, seen)
    elif isinstance(part, tuple | list):
        for one in part:
            yield from _homes(one, seen)
    elif (home := type(part).__module__).partition(".")[0] in _PACKAGES:
        yield home
        for one in getattr(part, "__dict__", {}).values():
            yield from _homes(one, seen)


@cache
def _version_of(homes: frozenset[str]) -> int:
    """Return the checksum of all compiled sources that these modules reach."""
    compiled = filter(_is_compiled, _reached(homes, _imported))
    return crc32(b"".join(map(_source, sorted(_reached(compiled, _read_at_compile_time)))))


def _reached(modules: Iterable[str], further: Callable[[str], list[str]]) -> set[str]:
    """Return these modules and what is reached from them. further: the modules next to one."""
    reached, waiting = set[str](), [*modules]
    while waiting:
        if (module := waiting.pop()) not in reached:
            reached.add(module)
            waiting += further(module)
    return reached


@cache
def _source(module: str) -> bytes:
    """Return the source of a module of ours, empty if it is none."""
    if (file := _file(module)) is None:
        return b""
    return file.read_bytes()


def _file(module: str) -> Path | None:
    path = _ROOT.joinpath(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None) if module.startswith(_PACKAGES) else None


@cache
def _imported(module: str) -> list[str]:
    """Return the modules of ours that a module may import, within functions too."""
    found = []
    for source, names in _IMPORT.findall(_source(module)):
        package = source.decode()
        found.append(package)
        if _ROOT.joinpath(*package.split(".")).is_dir():
            found += [f"{package}.{name}" for name in re.findall(r"\w+", names.decode())]
    return found


@cache
def _read_at_compile_time(module: str) -> list[str]:
    """Return the modules of ours whose constants a module imports, by their names in capitals or with the module."""
    found = []
    for source, names in _IMPORT.findall(_source(module)):
        package = source.decode()
        parts = [f"{package}.{name}" for name in re.findall(r"\w+", names.decode())]
        found += [part for part in parts if _file(part) is not None]
        if not names or _CONSTANT.search(names):
            found.append(package)
    return found


@cache
def _is_compiled(module: str) -> bool:
    """Return whether numba compiles anything of a module, or the module emits instructions for it."""
    return _COMPILED.search(_source(module)) is not None


def machine_code() -> str:
    """Return what decides the machine code of our kernels: their sources, their compiler, and the processor."""
    files = [file.relative_to(_ROOT) for package in _PACKAGES for file in (_ROOT / package).rglob("*.py")]
    modules = frozenset(".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files)
    sources = _version_of(modules)
    compiler = [f"{name} {version(name)}" for name in ("numba", "llvmlite")]
    features = sorted(llvm.get_host_cpu_features().items())
    return f"{sources:x} {compiler} {llvm.get_host_cpu_name()} {features}"


def on_first_compilation(tell: Callable[[], None]) -> None:
    """Call `tell` once, when something is compiled that no earlier process has left in the cache."""

    class First(event.Listener):
        def on_start(self, event_: event.Event) -> None:
            event.unregister("numba:compile", self)
            tell()

        def on_end(self, event_: event.Event) -> None:
            pass

    event.register("numba:compile", First())


_PATIENCE_S = 10.0  # in which every other process has written its kernel


class _Files(caching.IndexDataCacheFile):
    """numba's index and files of the functions of one name, for several processes that write them."""

    def save(self, key: Any, data: Any) -> None:
        try:
            # The process that holds it may be stopped: then this kernel is not kept, and nobody waits for long.
            with FileLock(Path(self._cache_path) / "talon.lock", timeout=_PATIENCE_S):
                names = self._load_index()
                free = next(name for number in count(1) if (name := self._data_name(number)) not in names.values())
                self._save_data(names.get(key, free), data)
                if key not in names:
                    self._save_index({**names, key: free})
        except OSError as error:
            if (reason := error.strerror or str(error)) not in _TOLD:
                _TOLD.add(reason)
                where = f"{self._cache_path}: compiled kernels cannot be kept ({reason})"
                print(f"talon: {where}: each start compiles them", file=sys.stderr)

    def load(self, key: Any) -> Any:
        try:
            return super().load(key)
        except Exception:  # a damaged pickle raises anything
            return None

    def _load_index(self) -> Any:
        try:
            return super()._load_index()
        except Exception:
            return {}


class _Nowhere(caching._SourceFileBackedLocatorMixin, caching._CacheLocator):
    """The last place that numba asks for, where it would refuse to compile: nothing can be written."""

    def __init__(self, function: Any, file: str):
        self._py_file, self._lineno = file, function.__code__.co_firstlineno

    def ensure_cache_path(self) -> None:
        pass

    def get_cache_path(self) -> str:
        return str(Path(self._py_file).parent / "__pycache__")


def _number_functions_anew() -> None:
    """Let numba tell this process's functions apart by numbers that no other process uses."""
    bytecode.FunctionIdentity._unique_ids = count(secrets.randbits(60))


_number_functions_anew()
os.register_at_fork(after_in_child=_number_functions_anew)
caching.IndexDataCacheFile = _Files
caching.CacheImpl._locator_classes.append(_Nowhere)
