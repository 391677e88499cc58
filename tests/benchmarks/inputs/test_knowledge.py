from __future__ import annotations

import pytest

from benchmarks.inputs.knowledge import exact_match, f1, normalised, subspan_match


def test_case_articles_and_punctuation_do_not_count() -> None:
    assert normalised(" The  Wilhelm-Conrad, a Röntgen!") == "wilhelmconrad röntgen"
    assert exact_match("The Beatles.", ["the rolling stones", "beatles"]) == 1
    assert exact_match("The Beatles.", ["the rolling stones"]) == 0


def test_f1_is_the_best_over_the_references_and_counts_words_as_often_as_both_have_them() -> None:
    assert f1("in 1901 in Sweden", ["1901", "sweden in"]) == pytest.approx(2 * 2 / (4 + 2))
    assert f1("red red", ["red"]) == pytest.approx(2 / 3)
    assert f1("", ["red"]) == 0 and f1("the", ["a"]) == 1


def test_a_sentence_that_holds_the_answer_in_its_first_line_counts() -> None:
    assert subspan_match("It was Wilhelm Röntgen, in 1901.\nSweden.", ["the Röntgen"]) == 1
    assert subspan_match("It was Wilhelm Röntgen, in 1901.\nSweden.", ["Sweden"]) == 0
