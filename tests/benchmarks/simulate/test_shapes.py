"""Tree shapes measured without workers: the text must be plain decoding's, the widths those of the trees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.report.records import Shape
from benchmarks.report.tree_plots import tree_shapes
from benchmarks.simulate.known_answers import answer
from benchmarks.simulate.shapes import Shaped, mean_widths, shape_of, table
from drafters.registry import build
from engine.config import load
from engine.core.drafter_protocol import Verdict
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.model.target import Target

PROMPT = [40, 41, 42, 40, 41, 42, 40, 41]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_answer_is_that_of_plain_decoding(temperature: float, tiny: str) -> None:
    target, sampling = Target.load(tiny, "float32"), SamplingParams(max_tokens=24, temperature=temperature, seed=4)
    texts = []
    for method in ("suffix", "pld"):
        drafter = build(load({"model": tiny, "method": method}))
        texts.append([t for v in answer(target, drafter, PROMPT, sampling, 60) for t in v.tokens])
    assert texts[0] == texts[1] and len(texts[0]) == 24
    assert target.pool is not None and target.pool.free == target.pool.blocks, "answers give back what they held"
    if temperature == 0:
        assert texts[0] == greedy(tiny, 24)


def greedy(tiny: str, length: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=length, do_sample=False)
    tokens: list[int] = out[0, len(PROMPT) :].tolist()
    return tokens


def test_a_shape_counts_the_nodes_of_every_depth_below_the_root() -> None:
    tree = TokenTree.from_lists([1, 2, 3, 4], [-1, 0, 0, 1], [1.0, 0.5, 0.4, 0.3])
    shape = shape_of(Verdict(tree, [0, 1], [2, 9]))
    assert (shape.widths, shape.nodes, shape.depth, shape.emitted) == ([2, 1], 4, 2, 2)
    assert shape_of(Verdict(TokenTree.root_only(5), [0], [7])) == Shape([], 1)


def test_the_mean_tree_counts_trees_that_end_earlier_as_empty_there() -> None:
    assert mean_widths([Shape([4, 2], 1), Shape([2], 1)]) == [3.0, 1.0]


def test_table_and_picture_name_every_suite(tmp_path: Path) -> None:
    answers = [Shaped("easy", False, [Shape([3, 1, 1], 4)]), Shaped("hard", False, [Shape([10], 1)])]
    assert table(answers, "t").row_count == 2
    rounds = {a.suite: a.rounds for a in answers}
    tree_shapes({suite: mean_widths(some) for suite, some in rounds.items()}, rounds, tmp_path / "shapes.png")
    assert (tmp_path / "shapes.png").read_bytes().startswith(b"\x89PNG")
