from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from drafters.lookup.suffix import SuffixDrafter
from engine.core.drafter_protocol import Verdict
from engine.core.params import SamplingParams, Speculation
from engine.core.tree import TokenTree
from retrieval_index.datastore import Datastore


def test_an_owner_is_drafted_for_from_its_own_earlier_answers_and_from_nobody_elses() -> None:
    drafter = SuffixDrafter(budget=8)

    def follows(request: int, owner: str | None) -> bool:
        drafter.start(request, [6], of(owner))
        tree = drafter.propose(request)
        drafter.finish(request)
        return tree.child(0, 7) is not None

    drafter.start(1, [5], of("a"))
    drafter.observe(1, Verdict(TokenTree.root_only(5), [0], [6, 7, 8]))
    drafter.finish(1)
    drafter.start(2, [5], of(None))
    drafter.observe(2, Verdict(TokenTree.root_only(5), [0], [6, 7, 8]))
    drafter.finish(2)
    assert [follows(3 + i, owner) for i, owner in enumerate(["a", "b", "", None])] == [True, False, False, False]


def of(owner: str | None) -> SamplingParams:
    return SamplingParams(speculation=Speculation(owner=owner))


def test_an_outcome_asked_about_moves_the_root() -> None:
    drafter = SuffixDrafter(budget=4)
    drafter.start(1, [1, 2, 3, 4, 1], SamplingParams())
    tree = drafter.propose(1, [2])
    assert tree.tokens[0] == 2 and tree.child(0, 3) is not None and len(tree) == 4
    assert drafter.propose(1).tokens[0] == 1


def test_it_begins_with_the_answers_of_a_datastore_and_keeps_room_for_its_own(tiny_draft: str) -> None:
    answers = Datastore(Path(tiny_draft) / "datastore")
    drafter = SuffixDrafter(capacity=4, answers=answers)
    (text,) = answers.texts()
    drafter.start(1, text[:3].tolist(), SamplingParams())
    assert drafter.propose(1).child(0, int(text[3])) is not None
    drafter.observe(1, Verdict(TokenTree.root_only(0), [0], [1, 2, 3, 4, 5, 6]))
    drafter.finish(1)
    assert drafter.index.cached_tokens() == 4
    drafter.start(2, text[:3].tolist(), SamplingParams())
    assert drafter.propose(2).child(0, int(text[3])) is not None


@pytest.mark.parametrize("shared_noise", [True, False])
def test_noise_ranks_unless_it_is_not_shared(shared_noise: bool) -> None:
    drafter = SuffixDrafter(shared_noise=shared_noise)
    prompt, sampling = [7, 1, 7, 2, 7, 3, 7, 4, 7], SamplingParams(temperature=1.0)
    firsts = set()
    for request in range(20):
        drafter.start(request, prompt, msgspec.structs.replace(sampling, seed=request))
        firsts.add(int(drafter.propose(request).tokens[1]))
        drafter.finish(request)
    assert len(firsts) > 1 if shared_noise else firsts == {4}


def test_no_kernel_is_left_to_compile_when_the_worker_is_ready() -> None:
    """Compiling takes seconds of a core that the target needs. In a new process, since kernels compile once in each."""
    program = """
from drafters.lookup.suffix import SuffixDrafter
from engine.config import Config
from engine.sampling import noise_bits
from retrieval_index import ngrams
SuffixDrafter.from_config(Config())
print([kernel.__name__ for kernel in (ngrams.append, ngrams.draft, ngrams.remember, ngrams.copy_into,
                             noise_bits._keys)
       if len(kernel.signatures) != 1])
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"
