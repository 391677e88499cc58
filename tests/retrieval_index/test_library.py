"""The libraries of the extra `index`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from retrieval_index.build import write_shard
from retrieval_index.datastore import DatastoreError


def test_an_index_without_its_library_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydivsufsort", None)
    with pytest.raises(DatastoreError, match=r"pydivsufsort is missing: pip install 'talon-decoding\[index\]'"):
        write_shard(tmp_path, 0, np.arange(3, dtype=np.uint32), 2)
