from __future__ import annotations

import subprocess
import sys

from drafters.base import Verdict
from drafters.suffix import SuffixDrafter
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


def test_an_outcome_asked_about_moves_the_root() -> None:
    drafter = SuffixDrafter()
    drafter.start(1, [1, 2, 3, 4, 1], SamplingParams())
    tree = drafter.propose(1, [2])
    assert tree.tokens[0] == 2 and tree.child(0, 3) is not None
    assert drafter.propose(1).tokens[0] == 1


def test_no_kernel_is_left_to_compile_when_the_worker_is_ready() -> None:
    """Compiling takes seconds of a core that the target needs. In a new process, since kernels compile once in each."""
    program = """
from drafters.suffix import SuffixDrafter
from engine.config import Config
from retrieval_index import ngrams
SuffixDrafter.from_config(Config())
print([kernel.__name__ for kernel in (ngrams.append, ngrams.draft, ngrams.remember, ngrams.copy_into)
       if len(kernel.signatures) != 1])
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"
