"""What a round's trees came to, drawn, walked and moved on the device, through Triton's interpreter or on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: CUDA builds of torch bring it, or pip install triton")

import triton.language as tl

from engine import device
from engine.core.kv_shape import KVShape
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.model.cuda import noise_kernels, receipt, walk_kernels
from engine.model.cuda.receipt import Receipt
from engine.model.kv_cache import KVCache
from engine.model.kv_pool import KVPool
from engine.model.runner import bfloat16_bits
from engine.sampling.argmax import NAN
from engine.sampling.drawn_tree import DrawnTree
from engine.sampling.noise import gumbel
from engine.sampling.sampler import UNSETTLED, Sampler, verify
from tests.engine.verifier.test_forward_output import VOCABULARY, logits_of, sampler_of, tree_of

pytestmark = pytest.mark.usefixtures("no_gradients")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GREEDY, SAMPLED = SamplingParams(temperature=0.0, max_tokens=50), SamplingParams(temperature=0.9, seed=4, max_tokens=50)
TRUNCATED = SamplingParams(temperature=0.9, top_p=0.5, seed=4, max_tokens=50)
NODES = 24
FIRST = 5  # rows of something else before the trees'


def receipt_of(
    trees: list[TokenTree], samplers: list[Sampler], logits: Tensor, states: Tensor | None = None, pool: Any = None,
    caches: list[KVCache] | None = None,
) -> Receipt:  # fmt: skip
    """Return the receipt of trees whose rows come one after the other."""
    first, drawn = FIRST, []
    for i, (tree, sampler) in enumerate(zip(trees, samplers, strict=True)):
        drawn.append(DrawnTree(tree, sampler, first, None if caches is None else caches[i]))
        first += len(tree)
    return Receipt(drawn, logits.to(DEVICE), None if states is None else states.to(DEVICE), pool)


def test_paths_and_tokens_are_those_of_verify_node_by_node() -> None:
    trees = [tree_of(seed, NODES) for seed in range(6)]
    ways = [GREEDY, SAMPLED, SAMPLED, GREEDY, TRUNCATED, SAMPLED]
    logits, states = logits_of(FIRST + 6 * NODES), torch.randn(FIRST + 6 * NODES, 2, 3)
    for i, tree in enumerate(trees):  # what is drafted is likely
        logits[FIRST + NODES * i + tree.parents[1:], tree.tokens[1:]] += 3
    samplers = [sampler_of(way, 3 + i) for i, way in enumerate(ways)]
    found = receipt_of(trees, samplers, logits, states)
    lengths = set()
    for i, tree in enumerate(trees):
        begin = FIRST + NODES * i
        rows, known = logits[begin : begin + NODES], found.known(i)
        expected = verify(tree, rows, sampler_of(ways[i], 3 + i))
        assert (known is None) == (ways[i] is TRUNCATED)
        assert verify(tree, rows, samplers[i], known) == expected
        if known is not None:
            assert tree.walk(known) == expected[0]
        sent = found.states_of(i, expected[0])
        assert sent is not None
        of_path = states[begin:][expected[0]]
        assert (sent == of_path.bfloat16().view(torch.uint16).numpy()).all()
        lengths.add(len(expected[0]))
    assert len(lengths) > 2


def test_a_walk_that_comes_to_logits_that_are_no_numbers_ends_before_them_on_the_host() -> None:
    """The device's own walk has one node more, whose token nobody knows."""
    tree, draws = TokenTree.chain(0, [1, 2, 3], [1.0] * 3), [1, 2, 3, 4]
    logits, states = torch.zeros(FIRST + 4, VOCABULARY), torch.randn(FIRST + 4, 2, 3).bfloat16()
    logits[range(FIRST, FIRST + 4), draws] = 1
    logits[FIRST + 2, 5] = torch.nan
    for way in (GREEDY, SAMPLED):
        sampler = sampler_of(way)
        if way is SAMPLED:
            logits[range(FIRST, FIRST + 4), draws] = 90
        found = receipt_of([tree], [sampler], logits, states)
        known = found.known(0)
        assert known == [1, 2, NAN, 4] and tree.walk(known) == [0, 1, 2]
        path, tokens = verify(tree, logits[FIRST:], sampler, known)
        assert (path, tokens) == ([0, 1], [1, 2]) and sampler.drawn == 2
        sent = found.states_of(0, path)
        assert sent is not None and (sent == states[FIRST:][path].view(torch.uint16).numpy()).all()


def test_nothing_is_read_before_it_is_asked_for_and_all_is_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, read = [0], [0]

    class Noted(device.Download):
        def __init__(self, results: Any):
            sent[0] += 1
            super().__init__(results)

        def read(self) -> list[Tensor]:
            read[0] += 1
            return super().read()

    monkeypatch.setattr(receipt, "Download", Noted)
    trees = [tree_of(1), tree_of(2)]
    found = receipt_of(trees, [sampler_of(GREEDY), sampler_of(SAMPLED)], logits_of(FIRST + 24), torch.randn(29, 1, 2))
    assert (sent, read) == ([1], [0])
    found.wait()
    assert (sent, read) == ([1], [1])
    for i in range(2):
        found.states_of(i, trees[i].walk(found.known(i) or []))
    assert sent == [1] and read[0]


def test_states_of_longer_paths_than_are_sent_are_fetched_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipt, "_STATE_ROWS", 1)
    monkeypatch.setattr(receipt, "_LEAST_ROWS", 2)
    fetched: list[int] = []

    def noted(states: Tensor) -> Any:
        fetched.append(len(states))
        return bfloat16_bits(states)

    monkeypatch.setattr(receipt, "bfloat16_bits", noted)
    trees = [TokenTree.chain(0, tokens, [1.0] * len(tokens)) for tokens in ([1, 2, 3], [1, 2], [5])]
    drawn = [1, 2, 3, 4, 1, 2, 9, 0, 0]
    logits, states = torch.zeros(FIRST + 9, VOCABULARY), torch.randn(FIRST + 9, 2, 3).bfloat16()
    logits[range(FIRST, FIRST + 9), drawn] = 1
    found = receipt_of(trees, [sampler_of(GREEDY) for _ in trees], logits, states)
    for tree, first, path in ((0, 0, [0, 1, 2, 3]), (1, 4, [0, 1, 2]), (2, 7, [0]), (0, 0, [0, 1])):
        sent = found.states_of(tree, path)
        assert sent is not None and (sent == states[FIRST + first :][path].view(torch.uint16).numpy()).all()
    assert fetched == [7]
    other = found.states_of(0, [0, 2])  # no path that the device has walked
    assert other is not None and (other == states[FIRST:][[0, 2]].view(torch.uint16).numpy()).all()


@pytest.mark.parametrize("sent", [128, 1], ids=["all", "some are longer than what is gathered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_that_stay_on_the_device_are_those_that_are_sent_and_are_not_sent(
    sent: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receipt, "_STATE_ROWS", sent)
    monkeypatch.setattr(receipt, "_LEAST_ROWS", 1)
    downloads: list[int] = []

    class Noted(device.Download):
        def __init__(self, results: Any):
            downloads.append(sum(one.nbytes for one in results))
            super().__init__(results)

    monkeypatch.setattr(receipt, "Download", Noted)
    trees, rows = [tree_of(seed, NODES) for seed in range(3)], 3 * NODES
    logits, states = logits_of(rows), torch.randn(rows + 20, 2, 3).to(dtype)
    for i, tree in enumerate(trees):
        logits[NODES * i + tree.parents[1:], tree.tokens[1:]] += 3
    found = []
    for stays in (False, True):
        ways = [GREEDY, SAMPLED, TRUNCATED]
        drawn = [DrawnTree(tree, sampler_of(ways[i]), NODES * i) for i, tree in enumerate(trees)]
        given = logits.to(DEVICE), states.to(DEVICE), None, rows, 0, stays
        found.append(Receipt(drawn, *given))
    sent_states, staying = found
    for i, tree in enumerate(trees):
        path = tree.walk(sent_states.known(i) or [int(tree.tokens[1])] * NODES)
        for of_path in (path, path[:1], [0, 3]):
            assert same_bits(staying.states_of(i, of_path), sent_states.states_of(i, of_path))
    for first, count in ((rows, 20), (rows + 3, 5)):
        assert same_bits(staying.read_states(first, count), sent_states.read_states(first, count))
    assert downloads[0] > downloads[1] == 4 * 2 * NODES, "tokens alone"


def test_a_head_finds_on_the_device_what_the_host_makes_of_the_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """With zeros past the end of each path; trees that the host draws from are not among them."""
    ways, rows = [GREEDY, TRUNCATED, SAMPLED, GREEDY], 4 * NODES
    trees = [tree_of(seed, NODES) for seed in range(4)]
    logits, states = logits_of(rows), torch.randn(rows, 2, 3).bfloat16()
    for i, tree in enumerate(trees):
        logits[NODES * i + tree.parents[1:], tree.tokens[1:]] += 3

    def made(stays: bool) -> Receipt:
        drawn = [DrawnTree(tree, sampler_of(ways[i]), NODES * i) for i, tree in enumerate(trees)]
        return Receipt(drawn, logits.to(DEVICE), states.to(DEVICE), None, rows, 0, stays)

    found = made(stays=True).on_device
    assert found is not None and found.places == {0: 0, 2: 1, 3: 2}
    assert found.tokens.shape[1] == 1 + max(int(trees[i].depths.max()) for i in found.places)
    lengths = set()
    for i, place in found.places.items():
        path, tokens = verify(trees[i], logits[NODES * i :][:NODES], sampler_of(ways[i]))
        count = int(found.lengths[place])
        assert count == len(path) and found.tokens[place].tolist()[:count] == tokens
        assert torch.equal(found.features[place, :count].cpu(), states[NODES * i :][path])
        assert not found.tokens[place, count:].any() and not found.features[place, count:].any()
        lengths.add(count)
    assert len(lengths) > 1
    monkeypatch.setattr(noise_kernels, "_TOLERANCE", tl.constexpr(1e3))
    unsettled = made(stays=True).on_device
    assert unsettled is not None and int(unsettled.lengths[1]) == 1 and not unsettled.tokens[1].any(), "the host draws"
    assert made(stays=False).on_device is None, "the states are sent"
    monkeypatch.setattr(receipt, "_STAYING_ROWS", 3)
    monkeypatch.setattr(receipt, "_LEAST_ROWS", 1)
    assert made(stays=True).on_device is None, "not all that may be accepted has been gathered"


def same_bits(there: Any, here: Any) -> bool:
    assert isinstance(there, Tensor) and there.device.type == DEVICE.type
    return bool((there.view(torch.uint16).cpu().numpy() == here).all()) and there.shape == here.shape


@pytest.mark.parametrize("stays", [True, False])
def test_roots_send_a_row_each_and_what_stays_holds_no_rows_of_trees(stays: bool) -> None:
    states, root = torch.randn(FIRST + 40, 1, 2).bfloat16(), TokenTree.root_only(0)
    drawn = [DrawnTree(root, sampler_of(GREEDY), i) for i in range(FIRST)]
    found = Receipt(drawn, logits_of(FIRST).to(DEVICE), states.to(DEVICE), None, FIRST, 0, stays)
    assert found._rows_sent == 1
    chunk: Any = found.read_states(FIRST, 40)
    assert (chunk.untyped_storage().nbytes() if stays else chunk.nbytes) == 40 * 2 * 2


@pytest.mark.parametrize("past", [3, 16, 29])
def test_keys_and_values_of_the_accepted_path_are_where_a_commit_puts_them(past: int) -> None:
    tree = TokenTree.from_lists([0, 5, 1, 6, 2, 3], [-1, 0, 0, 2, 2, 4], [1.0] * 6)
    logits = torch.zeros(FIRST + 6, VOCABULARY)
    logits[range(FIRST, FIRST + 6), [1, 0, 2, 0, 3, 4]] = 1  # the path is 0, 2, 4, 5
    pool = KVPool(KVShape(2, 3, 8, torch.bfloat16), 9, DEVICE)
    pool.allocate(2)
    generator = torch.Generator().manual_seed(past)
    for part in (pool.keys, pool.values):
        part.copy_(torch.randn(part.shape, generator=generator))
    cache = KVCache(pool)
    cache.reserve(past + 6)
    cache.length = past
    before = pool.keys.clone(), pool.values.clone()
    found = receipt_of([tree], [sampler_of(GREEDY)], logits, pool=pool, caches=[cache])
    path, _ = verify(tree, logits[FIRST:], sampler_of(GREEDY), found.known(0))
    by_device = pool.keys.clone(), pool.values.clone()
    assert path == [0, 2, 4, 5] and cache.keep(path) is None, "nothing is left to move"
    pool.keys.copy_(before[0]), pool.values.copy_(before[1])
    cache.length = past
    cache.commit(path)
    assert torch.equal(by_device[0], pool.keys) and torch.equal(by_device[1], pool.values)
    assert not torch.equal(by_device[0], before[0])


def test_what_the_host_accepts_beyond_the_device_is_moved_from_where_it_still_is() -> None:
    """A draw that the host has to settle ends the device's path."""
    cache = KVCache(KVPool(KVShape(1, 1, 8, torch.float32), 4))
    cache.reserve(20)
    cache.moved = [0, 2]
    moves = cache.keep([0, 2, 4])
    assert moves is not None and [part.tolist() for part in moves] == [[4], [2]] and not cache.moved
    cache.length, cache.moved = 0, [0, 2, 4, 5]
    assert cache.keep([0, 2]) is None, "the request ended"


@pytest.mark.parametrize("broken", ["keys", "values", ""])
def test_blocks_that_a_round_fills_are_checked_in_its_receipt(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = KVPool(KVShape(2, 1, 8, torch.float32), 9, DEVICE)
    caches = [KVCache(pool) for _ in range(4)]
    trees = [*[TokenTree.root_only(0)] * 3, TokenTree.chain(0, [5, 6], [1.0] * 2)]
    for cache, length in zip(caches, (15, 7, 31, 14), strict=True):
        cache.reserve(length + 3)
        cache.length = length
        cache.cache_blocks([1] * length)
    if broken:
        getattr(pool, broken)[1, caches[0].block_table[0], 0, 3, 5] = torch.inf
    found = receipt_of(trees, [sampler_of(GREEDY) for _ in trees], logits_of(FIRST + 6), pool=pool, caches=caches)
    found.wait()
    monkeypatch.setattr(pool, "finite", lambda blocks: pytest.fail("waits for the device again"))
    for cache, tree in zip(caches, trees, strict=True):
        cache.commit(range(len(tree)))
        cache.cache_blocks([1] * cache.length)
    assert [cache.spoiled for cache in caches] == [bool(broken), False, False, False]


def test_a_block_into_which_the_host_moves_entries_is_checked_again() -> None:
    pool = KVPool(KVShape(1, 1, 8, torch.float32), 4)
    cache = KVCache(pool)
    cache.reserve(20)
    cache.length, cache.checked = 14, {int(cache.block_table[0]): True}
    pool.keys[0, cache.block_table[1], 0, 0, 1] = torch.nan
    cache.commit([0, 3])
    cache.cache_blocks([1] * 16)
    assert cache.spoiled


def test_roots_that_are_all_drawn_on_the_device_are_known_there() -> None:
    logits, root = logits_of(FIRST + 8), TokenTree.root_only(0)
    plain = receipt_of([root] * 3, [sampler_of(GREEDY), sampler_of(SAMPLED), sampler_of(GREEDY)], logits)
    assert plain.roots is not None and plain.roots.tolist() == [
        token for i in range(3) for token in plain.known(i) or []
    ]
    assert receipt_of([root] * 2, [sampler_of(GREEDY), sampler_of(TRUNCATED)], logits).roots is None
    assert receipt_of([root, tree_of(1, 4)], [sampler_of(GREEDY)] * 2, logits).roots is None
    assert receipt_of([tree_of(1, 2), root], [sampler_of(GREEDY), sampler_of(TRUNCATED)], logits).roots is None


def test_nothing_is_moved_where_a_grammar_may_rule_a_token_out() -> None:
    pool = KVPool(KVShape(1, 1, 8, torch.float32), 4, DEVICE)
    cache, sampler = KVCache(pool), sampler_of(GREEDY)
    cache.reserve(20)
    sampler._matcher = object()  # type: ignore[assignment]
    logits = torch.zeros(FIRST + 3, VOCABULARY)
    logits[FIRST, 2] = 1
    pool.keys.copy_(torch.randn(pool.keys.shape))
    before = pool.keys.clone()
    tree = TokenTree.from_lists([0, 1, 2], [-1, 0, 0], [1.0] * 3)
    found = receipt_of([tree], [sampler], logits, pool=pool, caches=[cache])
    assert found.known(0) is not None and torch.equal(pool.keys, before) and not cache.moved


def test_a_tree_of_more_nodes_than_are_compared_at_once_is_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk_kernels, "_NODES", 4)
    tree, logits = tree_of(3, 40), logits_of(FIRST + 40)
    found = receipt_of([tree], [sampler_of(SAMPLED)], logits)
    known = found.known(0)
    assert known is not None and tree.walk(known) == verify(tree, logits[FIRST:], sampler_of(SAMPLED))[0]


def one_draw(logits: Tensor, sampling: SamplingParams = SAMPLED) -> int:
    known = receipt_of([TokenTree.root_only(0)], [sampler_of(sampling)], logits).known(0)
    assert known is not None
    return known[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7, 25.0, 0.002])
@pytest.mark.parametrize("vocab", [5, 2048, 5000])
def test_draws_are_those_of_the_host(vocab: int, temperature: float, dtype: torch.dtype) -> None:
    logits = (torch.randn(FIRST + 1, vocab, generator=torch.Generator().manual_seed(vocab)) * 3).to(dtype)
    way = SamplingParams(temperature=temperature, seed=2**63 - 9, max_tokens=50)
    sampler = Sampler(way, [1] * 3, [], vocab)
    expected = Sampler(way, [1] * 3, [], vocab).draw(sampler.choices(logits[FIRST:])[0])
    found = Receipt([DrawnTree(TokenTree.root_only(0), sampler, FIRST)], logits.to(DEVICE), None, None)
    assert found.known(0) == [expected]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_what_is_no_number_is_said_wherever_it_is(sampling: SamplingParams) -> None:
    for place in (0, 2047, 2048, 4500):
        logits = torch.zeros(FIRST + 1, 5000)
        logits[FIRST, place] = torch.nan
        assert one_draw(logits, sampling) == NAN


def test_of_equal_logits_the_first_is_taken_and_an_infinity_is_left_to_the_host() -> None:
    logits = torch.zeros(FIRST + 1, 5000)
    logits[FIRST, [9, 4000]] = 3
    assert one_draw(logits, GREEDY) == 9
    logits[FIRST, [9, 4000]] = torch.inf
    assert one_draw(logits, GREEDY) == 9 and one_draw(logits) == UNSETTLED


@pytest.mark.parametrize("near", [(10, 4000), (10, 11)], ids=["in two parts", "in one part"])
def test_tokens_that_come_near_each_other_are_left_to_the_host(
    near: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise_kernels, "_TOLERANCE", tl.constexpr(1e-3))
    logits = torch.full((FIRST + 1, 5000), -1e9)
    noise = gumbel(SAMPLED.seed, 3, torch.arange(5000)).numpy()
    logits[FIRST, list(near)] = torch.from_numpy((40 - noise[list(near)]) * 0.9).float()
    assert one_draw(logits) == UNSETTLED
    sampler = sampler_of(SAMPLED)
    drawn = sampler.draw(sampler.choices(logits[FIRST:], [UNSETTLED])[0])
    assert drawn == sampler_of(SAMPLED).draw(sampler.choices(logits[FIRST:])[0]) and drawn in near
    logits[FIRST, near[1]] += 0.1
    assert one_draw(logits) == near[1]


def test_states_of_prompts_and_the_likeliest_tokens_come_with_the_rest() -> None:
    tree, logits, states = tree_of(1, 4), logits_of(5), torch.randn(9, 2, 3).bfloat16()
    drawn = [DrawnTree(tree, sampler_of(GREEDY), 0), DrawnTree(TokenTree.root_only(0), sampler_of(SAMPLED), 4)]
    found = Receipt(drawn, logits.to(DEVICE), states.to(DEVICE), None, rows=4, successors=2)
    read, ranked = found.read_states(5, 3), found.successors_of(1, 3)
    assert read is not None and (read == states[5:8].view(torch.uint16).numpy()).all()
    assert ranked is not None and (ranked == logits[1:4].topk(2).indices.numpy()).all()
    sampler = sampler_of(SAMPLED)
    assert found.known(1) == [sampler.draw(sampler.choices(logits[4:])[0])]
