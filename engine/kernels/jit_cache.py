"""Compiled functions in numba's cache on disk.

The cache notices changes only of the file that defines a function. A function of another file that is compiled into it
would stay there as it was, also after an update. So the name in the cache has the checksum of all files that numba
compiles anything of: those that import it, or decorate with one of our own decorators.

Two processes that compile at once would give two functions one file: numba reads the index, chooses a name that is
free, and writes both, and closures of one function share an index. So writers take turns here. Whatever else fails
(a full disk, a file that a power cut has emptied, a folder that is read only) costs the cache alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

import llvmlite.binding as llvm
from filelock import FileLock
from numba.core import caching, event

_PACKAGES = ("engine", "drafters", "retrieval_index")
_COMPILED = re.compile(rb"numba|^@(?:kernel|inlined)\b", re.MULTILINE)
_TOLD = set[str]()  # why kernels cannot be kept


def versioned(work: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator, below numba's: names the function by the version of all compiled sources."""
    work.__qualname__ += f"_{_sources():x}"
    return work


@cache
def _sources() -> int:
    root = Path(__file__).parents[2]
    contents = (file.read_bytes() for package in _PACKAGES for file in sorted((root / package).rglob("*.py")))
    return crc32(b"".join(content for content in contents if _COMPILED.search(content)))


def machine_code() -> str:
    """What decides the machine code of our kernels: their sources, their compiler, and the processor."""
    compiler = [f"{name} {version(name)}" for name in ("numba", "llvmlite")]
    features = sorted(llvm.get_host_cpu_features().items())
    return f"{_sources():x} {compiler} {llvm.get_host_cpu_name()} {features}"


def on_first_compilation(tell: Callable[[], None]) -> None:
    """Call `tell` once, when something is compiled that no earlier process has left in the cache."""

    class First(event.Listener):
        def on_start(self, event_: event.Event) -> None:
            event.unregister("numba:compile", self)
            tell()

        def on_end(self, event_: event.Event) -> None:
            pass

    event.register("numba:compile", First())


class _Files(caching.IndexDataCacheFile):
    """numba's index and files of the functions of one name, for several processes that write them."""

    def save(self, key: Any, data: Any) -> None:
        try:
            with FileLock(Path(self._cache_path) / "talon.lock"):
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


caching.IndexDataCacheFile = _Files
caching.CacheImpl._locator_classes.append(_Nowhere)
