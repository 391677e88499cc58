from __future__ import annotations

from drafters.base import Verdict
from drafters.suffix import SOURCE, SuffixDrafter
from engine.sampling import SamplingParams
from engine.tree import TokenTree


def test_it_drafts_from_its_text_and_from_finished_answers() -> None:
    drafter = SuffixDrafter(budget=4)
    drafter.start(1, [5], SamplingParams())
    drafter.observe(1, Verdict(TokenTree.root_only(5), [0], [6, 7, 8]))
    drafter.finish(1)
    drafter.start(2, [6], SamplingParams())
    tree = drafter.propose(2)
    assert tree.child(0, 7) is not None
    assert len(tree) == 4
    assert tree.source.tolist() == [0, SOURCE, SOURCE, SOURCE]


def test_an_outcome_asked_about_moves_the_root() -> None:
    drafter = SuffixDrafter()
    drafter.start(1, [1, 2, 3, 4, 1], SamplingParams())
    tree = drafter.propose(1, [2])
    assert tree.tokens[0] == 2 and tree.child(0, 3) is not None
    assert drafter.propose(1).tokens[0] == 1
