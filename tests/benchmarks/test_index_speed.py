from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.datastore_speed import Times
from benchmarks.index_speed import DatastoreFigures, SessionFigures, rows
from tests.benchmarks.test_commands import talon
from tests.conftest import tiny_tokenizer


def test_the_command_measures_both_indexes(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    words = np.random.default_rng(0).choice(["one ", "two ", "three ", "four "], 12_000)
    (tmp_path / "corpus.txt").write_text("".join(words))
    options = ["--tokenizer", str(tmp_path / "tokenizer"), "--input", str(tmp_path / "corpus.txt")]
    done = talon("index", "speed", *options, "--tokens", "40000", "--cached", "5000", "--context", "500", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["session"]["cached_tokens"] == 5000 and told["session"]["query"]["p50"] > 0
    assert told["cache"]["tokens"] == 40_000
    assert told["datastore"]["tokens"] == 40_000 and told["datastore"]["of_it_data_mb"] > 0
    done = talon("index", "speed", *options, "--tokens", "90000")
    assert done.returncode == 2 and "give more text" in done.stderr


def test_memory_that_did_not_grow_is_not_shown_as_none_taken() -> None:
    times = Times(1.0, 2.0)
    store = DatastoreFigures(50_000, 1e6, 1.0, times, 9.0, 1.0)
    told = {
        what: measured for what, measured, _ in rows(SessionFigures(500, 5000, 16, times, times, 0.0), (9, 0), store)
    }
    assert told["session cache, bytes a token"] == "-" and told["session cache fed 50,000 tokens"] == "9 kept, - MB"


@pytest.mark.slow
def test_the_indexes_cost_what_they_may(shared: Path) -> None:
    """With room for a machine that does other things too."""
    tokenizer = str(shared / "models" / "tokenizers" / "llama2")
    corpus = str(shared / "data" / "corpus" / "books.jsonl.xz")
    told = json.loads(talon("index", "speed", "--tokenizer", tokenizer, "--input", corpus, "--json").stdout)
    session, store = told["session"], told["datastore"]
    assert session["query"]["p50"] < 2 * 25 and session["append_us"]["p50"] < 2 * 3
    assert session["bytes_per_token"] < 200
    assert told["cache"]["tokens"] <= 10_000_000 and told["cache"]["bytes"] < 200 * 10_000_000
    assert store["query"]["p50"] < 100 and store["open_ms"] < 50 and store["resident_mb"] < 200
    assert store["build_tokens_per_s"] > 500_000
