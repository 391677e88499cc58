"""What a round does on CUDA, counted from traced programs on any machine: kernels, launches, waits, bytes.

An 8B shape and its draft heads run on a device without memory (`traced_device`), through the same code as on a GPU: a
round drafts a tree for every request, verifies all trees in one forward, draws, and tells the drafter. What the host
reads is invented, so trees have a plausible shape, and texts mean nothing.

Milliseconds are an estimate for an H100, from the counted bytes and operations alone: nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from drafters.heads.checkpoint import Checkpoint, TargetWeights
from drafters.heads.head import Head
from drafters.heads.head_drafter import HeadDrafter
from engine.core.batch import Segment
from engine.core.drafter_protocol import Verdict
from engine.core.kv_shape import KVShape
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.kernels.attention.attention import Rule
from engine.model import cuda_products
from engine.model.cuda import graphs, layer_kernels, noise_kernels, triton_attention
from engine.model.cuda.cuda_forward import CudaForward
from engine.model.kv_pool import KVPool
from engine.model.runner import Runner
from engine.sampling.sampler import Sampler, verify
from engine.verifier.known_tokens import known_tokens, row_states

from .findings import Record, tried
from .models import HEADS, LLAMA_8B, kind_of, layout_of
from .traced_device import DEVICE, Counts, Launched, TracedTensor, Tracing, invented, on_device

REQUESTS = (1, 8, 32)
_PAST = 512  # positions of each text
_ROUNDS = 3  # of which the last is counted: the graphs of the others are captured
_ACCEPTED = 2  # nodes of each tree below its root
_ABSENT = LLAMA_8B.vocab_size - 1  # a token that no tree has
_KERNELS = {
    layer_kernels: ("norm", "enter", "gate"),
    triton_attention: ("_attend_chunk", "_attend_joined"),
    noise_kernels: ("draw_parts", "score_noisily"),
}
_BANDWIDTH, _FLOPS = 0.8 * 3.35e12, 0.6 * 989e12  # of an H100 SXM: bytes and operations a second that are reached
_LAUNCH_S, _IN_GRAPH_S, _WAIT_S, _BUS = 5e-6, 1.5e-6, 15e-6, 20e9  # of a kernel, of one in a graph, of a wait; bytes/s
SGLANG = 373.25
"""Tokens a second of SGLang with EAGLE-3 on one H100, by its documentation: Llama-3.1-8B, MT-bench, one request."""


def run(device: str) -> Iterator[Record]:
    tracing = Tracing()
    _replace_kernels(tracing)
    with torch.inference_mode(), tracing:
        runner = _target()
        yield tried("target", _forwards, tracing, runner)
        for method in HEADS:
            for temperature in (0.0, 1.0) if method == "eagle3" else (0.0,):
                for requests in REQUESTS:
                    yield tried(f"{method}, T={temperature:g}", _round, tracing, runner, method, requests, temperature)


def _replace_kernels(tracing: Tracing) -> None:
    for module, names in _KERNELS.items():
        for name in names:
            setattr(module, name, Launched(name, tracing))
    graphs._GRAPHS = (DEVICE.type,)
    graphs._warm_up = lambda *_: None
    graphs._captured = tracing.captured
    graphs._split_up = lambda packed, like: [invented(one.held) for one in like]


def _target() -> Runner:
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(LLAMA_8B, dtype=torch.bfloat16).eval()
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: _moved(tensor) for name, tensor in held.items() if tensor is not None})
    config = model.config
    shape = KVShape(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, torch.bfloat16)
    pool = KVPool(shape, 4096, DEVICE)
    forward = CudaForward(model, pool, config.num_attention_heads // config.num_key_value_heads)
    forward.rules = dict.fromkeys(range(config.num_hidden_layers), Rule(config.head_dim**-0.5))
    forward.sizes = cuda_products.SIZES
    if not forward.take_lean(config.max_position_embeddings):
        raise RuntimeError("the lean layers do not take this model")
    return Runner(forward, pool, config.vocab_size, model.dtype)


def _moved(tensor: Tensor) -> Tensor:
    moved = on_device(tensor)
    return nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved


def _head(method: str) -> Head:
    embedding = TracedTensor(
        torch.empty(LLAMA_8B.vocab_size, LLAMA_8B.hidden_size, dtype=torch.bfloat16, device="meta")
    )
    weights = TargetWeights(embedding, embedding, LLAMA_8B.num_hidden_layers)
    head: Head = kind_of(method)(_Weightless(method), weights, DEVICE)
    return head


class _Weightless(Checkpoint):
    """A checkpoint of a head for that target, without weights."""

    def __init__(self, method: str):
        self.path = self.method = method
        self.field, self.speculator = "drafter.path", None
        self.config, shapes, more = layout_of(method, LLAMA_8B)
        weights = {name: TracedTensor(torch.empty(shape, dtype=torch.bfloat16, device="meta"))
                   for name, shape in shapes.items()}  # fmt: skip
        self.tensors = weights | more


def _forwards(tracing: Tracing, runner: Runner) -> Record:
    """Kernels of a forward of 16 rows, and of each layer."""
    cache = runner.new_cache(64)
    tree = TokenTree.chain(1, [2] * 15, [1.0] * 15)
    runner.run([Segment.of_tree(tree, cache)])  # captures
    with tracing.counting() as counts:
        runner.run([Segment.of_tree(tree, cache)])
    cache.release()
    layers, names = LLAMA_8B.num_hidden_layers, counts.names
    of_layer = {name: count // layers for name, count in names.items() if count >= layers}
    return {"kernels": counts.graph_kernels, "kernels_a_layer": sum(of_layer.values()), "of_a_layer": of_layer,
            "weights_gb": round(counts.weights / 1e9, 2)}  # fmt: skip


@dataclass
class _Parts:
    """What a round's parts do."""

    draft: Counts
    forward: Counts
    draws: Counts
    told: Counts


class _Rounds:
    """Requests of so many positions, each with a tree a round."""

    def __init__(self, tracing: Tracing, runner: Runner, head: Head, requests: int, temperature: float):
        self.tracing, self.runner = tracing, runner
        self.drafter = HeadDrafter(head, head.published_growth)
        self.numbers = range(requests)
        prompt = [3 + i % 50 for i in range(_PAST)]
        sampling = SamplingParams(temperature=temperature, max_tokens=256)
        self.samplers = [Sampler(sampling, prompt, [], runner.vocab_size) for _ in self.numbers]
        self.caches = [runner.new_cache(_PAST) for _ in self.numbers]
        for number, cache in zip(self.numbers, self.caches, strict=True):
            cache.length = _PAST
            self.drafter.start(number, prompt, sampling)
            root = TokenTree.root_only(prompt[-1])
            self.drafter.observe(number, Verdict(root, [0], [9], self._features(_PAST)))

    def _features(self, rows: int) -> np.ndarray:
        return np.zeros((rows, len(self.drafter.feature_layers), LLAMA_8B.hidden_size), np.uint16)

    def step(self) -> tuple[_Parts, int]:
        """One round: what its parts do, and the rows verified."""
        counting, layers = self.tracing.counting, self.drafter.feature_layers
        with counting() as draft:
            trees = self.drafter.propose_many([(number, ()) for number in self.numbers])
        with counting() as forward:
            segments = [Segment.of_tree(tree, cache) for tree, cache in zip(trees, self.caches, strict=True)]
            logits, hidden_states = self.runner.run(segments, layers)
        with counting() as draws:
            verdicts = self._draw(trees, logits, hidden_states)
        with counting() as told:
            for number, cache, verdict in zip(self.numbers, self.caches, verdicts, strict=True):
                self.drafter.observe(number, verdict)
                cache.commit(verdict.path)
                cache.trim()
        return _Parts(draft, forward, draws, told), len(logits)

    def _draw(self, trees: Sequence[TokenTree], logits: Tensor, hidden_states: Tensor | None) -> list[Verdict]:
        """As `engine.verifier.step_result` does. Of each tree the same number of nodes is accepted."""
        begins = accumulate(map(len, trees), initial=0)
        known = [
            None if tokens is None else _accepting(tree, tokens)
            for tree, tokens in zip(trees, known_tokens(trees, self.samplers, logits), strict=True)
        ]
        states = row_states(hidden_states, trees, known)
        verdicts = []
        for tree, begin, sampler, tokens in zip(trees, begins, self.samplers, known, strict=False):
            path, drawn = verify(tree, logits[begin : begin + len(tree)], sampler, tokens)
            sent = None if states is None else states.of([begin + node for node in path])
            verdicts.append(Verdict(tree, path, drawn, sent))
        return verdicts

    def close(self) -> None:
        for number, cache in zip(self.numbers, self.caches, strict=True):
            self.drafter.finish(number)
            cache.release()


def _accepting(tree: TokenTree, tokens: Sequence[int]) -> list[int]:
    """What may be drawn at the tree's nodes, for the most confident ones to be accepted, as many as is usual."""
    drawn = [_ABSENT] * len(tokens)
    for node in tree.path(int(np.flatnonzero(tree.depths == min(_ACCEPTED, tree.depths.max()))[0]))[1:]:
        drawn[int(tree.parents[node])] = int(tree.tokens[node])
    return drawn


def _round(tracing: Tracing, runner: Runner, method: str, requests: int, temperature: float) -> Record:
    rounds = _Rounds(tracing, runner, _head(method), requests, temperature)
    for _ in range(_ROUNDS):
        steps = rounds.drafter.steps
        parts, rows = rounds.step()
    steps = max(1, rounds.drafter.steps - steps)
    assert runner.pool is not None
    kv_bytes = sum(cache.length for cache in rounds.caches) * runner.pool.shape.block_bytes // 16
    rounds.close()
    every = (parts.draft, parts.forward, parts.draws, parts.told)
    seconds = _seconds(parts.draft), _seconds(parts.forward, kv_bytes), _seconds(parts.draws) + _seconds(parts.told)
    return {
        "requests": requests,
        "rows": rows,
        "draft_steps": steps,
        "a_draft_step": {
            "launches": round((parts.draft.launches + parts.draft.replays) / steps, 1),
            "graph_kernels": round(parts.draft.graph_kernels / steps, 1),
            "waits": round(parts.draft.waits / steps, 1),
        },
        "forward_kernels": parts.forward.graph_kernels + parts.forward.launches,
        "launches": sum(one.launches + one.replays for one in every),
        "waits": {name: one.waits for name, one in vars(parts).items()},
        "waits_in_graphs": 0,  # tracing a graph that waits is an error
        "bytes_up": sum(one.up for one in every),
        "bytes_down": sum(one.down for one in every),
        "estimate_ms": {
            name: round(1000 * s, 2) for name, s in zip(("draft", "forward", "rest"), seconds, strict=True)
        },
        "tokens_a_round_for_sglang": round(SGLANG * sum(seconds), 2) if requests == 1 else None,
    }


def _seconds(counts: Counts, read: int = 0) -> float:
    """An estimate for an H100. read: bytes that attention reads."""
    device = max(
        (counts.weights + read) / _BANDWIDTH, counts.flops / _FLOPS, counts.graph_kernels * _IN_GRAPH_S
    )  # fmt: skip
    host = (counts.launches + counts.replays) * _LAUNCH_S + counts.waits * _WAIT_S
    return device + host + (counts.up + counts.down) / _BUS
