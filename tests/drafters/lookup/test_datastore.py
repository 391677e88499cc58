from __future__ import annotations

from pathlib import Path

import pytest

from drafters.lookup.datastore import DatastoreDrafter
from engine.core.drafter_protocol import Verdict
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from retrieval_index.build import build
from tests.conftest import tiny_tokenizer


@pytest.fixture
def drafter(tmp_path: Path) -> DatastoreDrafter:
    (tmp_path / "a.txt").write_text("one two three. one two three. one two four.")
    build(tiny_tokenizer(), [tmp_path / "a.txt"], tmp_path / "store")
    return DatastoreDrafter(tmp_path / "store", tokenizer=tiny_tokenizer(), budget=20, depth=4)


def test_it_drafts_what_followed_in_the_corpus(drafter: DatastoreDrafter) -> None:
    drafter.start(1, tiny_tokenizer().encode("say one two"), SamplingParams())
    tree = drafter.propose(1).validate(260)
    drafted = {tiny_tokenizer().decode(tree.path_tokens(node)[1:]) for node in range(1, len(tree))}
    assert {" thr", " fou"} <= drafted
    drafter.start(2, tiny_tokenizer().encode("zzz"), SamplingParams())
    assert len(drafter.propose(2)) == 1, "nothing matches"


def test_a_corpus_that_is_wrong_loses_confidence(drafter: DatastoreDrafter) -> None:
    prompt = tiny_tokenizer().encode("one two")
    drafter.start(1, prompt, SamplingParams())
    before = float(drafter.propose(1).confidence[1])
    for _ in range(20):
        drafter.observe(1, Verdict(TokenTree.root_only(prompt[-1]), [0], tiny_tokenizer().encode("! one two")))
    assert float(drafter.propose(1).confidence[1]) < before


def test_a_prepared_datastore_compiles_nothing_in_a_request(drafter: DatastoreDrafter) -> None:
    from retrieval_index.suffix_array import likeliest, longest_match, read

    drafter.store.prepare()
    before = [len(kernel.signatures) for kernel in (longest_match, read, likeliest)]
    drafter.start(1, tiny_tokenizer().encode("say one two"), SamplingParams())
    assert len(drafter.propose(1)) > 1
    assert [len(kernel.signatures) for kernel in (longest_match, read, likeliest)] == before
