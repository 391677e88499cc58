"""Libraries that only an index on disk needs: extra `index`."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from retrieval_index.datastore import DatastoreError


def check_library(name: str) -> None:
    """Raises DatastoreError if the module of that name is missing; does not load it."""
    try:
        found = find_spec(name) is not None
    except ValueError:  # it is None in sys.modules
        found = False
    if not found:
        raise DatastoreError(f"{name} is missing: pip install 'talon-decoding[index]'")


def library(name: str) -> Any:
    """The module of that name. Raises DatastoreError, one line that says how to get it."""
    check_library(name)
    return import_module(name)
