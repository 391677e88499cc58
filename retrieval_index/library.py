"""Import the libraries that only an index on disk needs: extra `index`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from retrieval_index.datastore import DatastoreError


def library(name: str) -> Any:
    """Return the module of that name. Raises DatastoreError, one line that says how to get it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # the library is there, and one that it needs is missing
            raise
        raise DatastoreError(f"{name} is missing: pip install 'talon-decoding[index]'") from None
