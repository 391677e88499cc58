"""Counts what a round does on CUDA, from traced programs on any machine: kernels, launches, waits, bytes.

An 8B shape and its draft heads run on a device without memory (`traced_device`), through the same code as on a GPU: a
round drafts a tree for every request, verifies all trees in one forward, draws, and tells the drafter. Plain rounds are
the verifier's own, 16 of each kind, in which each request fills a block. What the host reads is invented, so trees have
a plausible shape, and texts mean nothing.

Milliseconds are an estimate for an H100, from the counted bytes and operations alone: nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from drafters.heads.growth import ahead, behind, growth_kernel
from drafters.heads.growth.ahead import _layers_of as layers_of
from drafters.heads.growth.policies import Dynamic
from engine import device as device_module
from engine.core.batch import Segment
from engine.core.kv_shape import KVShape
from engine.core.tree import TokenTree
from engine.device import Download
from engine.kernels.attention.attention import Rule
from engine.model import cuda_products
from engine.model.cuda import graphs, layer_kernels, noise_kernels, triton_attention, walk_kernels
from engine.model.cuda.cuda_forward import CudaForward
from engine.model.kv_pool import KVPool
from engine.model.runner import Runner

from .findings import Record, tried
from .models import HEADS, LLAMA_8B
from .plain import PlainRounds
from .rounds import REQUESTS, Rounds, head_of
from .traced_device import DEVICE, Counts, Launched, TracedTensor, Tracing, invented, on_device

_ROUNDS = 3  # rounds, of which the last is counted: the graphs of the others are captured
_PLAIN_ROUNDS = 16
_PROMPT = 512  # tokens
_KERNELS = {
    layer_kernels: ("norm", "enter", "gate"),
    triton_attention: ("_attend_texts", "_attend_rows"),
    noise_kernels: ("draw_parts", "join_parts", "score_noisily", "rank"),
    walk_kernels: ("walk", "move", "gather", "check"),
    growth_kernel: ("_select",),
}
_BANDWIDTH, _FLOPS = 0.8 * 3.35e12, 0.6 * 989e12  # bytes and operations a second that an H100 SXM reaches
# seconds of a kernel's launch, of a kernel in a graph, of a wait; bytes/s
_LAUNCH_S, _IN_GRAPH_S, _WAIT_S, _BUS = 5e-6, 1.5e-6, 15e-6, 20e9
SGLANG = 373.25
"""Tokens a second of SGLang with EAGLE-3 on one H100, by its documentation: Llama-3.1-8B, MT-bench, one request."""


def run(device: str, layers: int | str = LLAMA_8B.num_hidden_layers) -> Iterator[Record]:
    """Count what rounds of each head do. layers: of the target; each takes the same kernels, and its time to trace."""
    tracing, served, config = Tracing(), list[Record](), deepcopy(LLAMA_8B)
    config.num_hidden_layers = int(layers)
    _replace_kernels(tracing)
    with torch.inference_mode(), tracing:
        runner = _target(config)
        yield tried("target", _forwards, tracing, runner, config.num_hidden_layers)
        for temperature in (0.0, 1.0):
            for requests in REQUESTS:
                served.append(tried(f"plain, T={temperature:g}", _plain, tracing, runner, requests, temperature))
                yield served[-1]
        cases: list[tuple[Any, ...]] = [(f"{method}, T=0", method, 0.0) for method in HEADS]
        cases += [
            ("eagle3, T=1", "eagle3", 1.0),
            ("eagle3, T=0, ipc", "eagle3", 0.0, False),
            ("eagle, dynamic, T=0", "eagle", 0.0, True, Dynamic()),
            ("eagle3, as served, T=0", "eagle3", 0.0, True, None, True),
            ("block, as served, T=1", "block", 1.0, True, None, True),
        ]
        for name, *case in cases:
            for requests in REQUESTS:
                served.append(tried(name, _round, tracing, runner, config, requests, *case))
                yield served[-1]
        for stay, name in ((True, "eagle3, a prompt"), (False, "eagle3, a prompt, ipc")):
            served.append(tried(name, _prompt, tracing, runner, config, stay))
            yield served[-1]
    yield {"check": "table", "table": _table(served)}


def _table(served: list[Record]) -> list[str]:
    """Format the rounds as the lines of a table."""
    lines = ["| | requests | launches | waits: draft | receipt | MB up | MB down |", "| --- |" + " ---: |" * 6]
    for one in [one for one in served if "waits" in one]:
        counts = f"{one['launches']:g} | {one['waits']['draft']:g} | {one['waits']['receipt']:g}"
        up, down = (f"{one[name] / 1e6:.2f}" for name in ("bytes_up", "bytes_down"))
        lines.append(f"| {one['check']} | {one['requests']} | {counts} | {up} | {down} |")
    return lines


def _layers_of(parts: Sequence[Tensor]) -> list[ahead._Drafted]:
    """Invent what `drafters.heads.growth.ahead` reads: layers whose nodes are the best candidates of those above."""
    parts = [*parts]
    trees, above = len(parts[2]), torch.ones(len(parts[2]), 1, dtype=torch.float64)
    for at in range(4, len(parts), 4):
        width = len(parts[at]) // trees
        following, prob = (part[:, :width].reshape(trees, -1) for part in parts[at - 2 : at])
        confidence = (above[..., None] * prob.view(trees, -1, width)).flatten(1)
        above, best = (part[:, :width] for part in confidence.sort(dim=1, descending=True, stable=True))
        parts[at], parts[at + 1] = (best // width).flatten(), following.gather(1, best).flatten()
    return layers_of(parts)


def _came_to(session: Any, tokens: Tensor) -> bool:
    """Take the host to have drawn what the device has, whose invented tokens say nothing."""
    return session.unread_tokens is not None


def _count_downloads(tracing: Tracing) -> None:
    """Let a download that is read count as a wait, unless one that was sent later has been waited for."""
    send, read = Download.__init__, Download.read

    def sent(self: Any, results: Sequence[Tensor]) -> None:
        send(self, results)
        self.number = tracing.sent = tracing.sent + 1

    def read_it(self: Any) -> list[Tensor]:
        tracing.read(self.number)
        return read(self)

    arrived = property(lambda self: tracing.has_arrived(self.number))
    for name, counted in (("__init__", sent), ("read", read_it), ("arrived", arrived)):
        setattr(Download, name, counted)


def _replace_kernels(tracing: Tracing) -> None:
    for module, names in _KERNELS.items():
        for name in names:
            setattr(module, name, Launched(name, tracing))
    graphs._GRAPHS = (DEVICE.type,)
    graphs._warm_up = lambda *_: None
    ahead._layers_of = _layers_of
    behind._came_to = _came_to
    _count_downloads(tracing)
    graphs._captured = tracing.captured
    device_module._split_up = lambda packed, like: [invented(one.held) for one in like]


def _target(config: LlamaConfig) -> Runner:
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: _moved(tensor) for name, tensor in held.items() if tensor is not None})
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


def _weight(_: str, shape: tuple[int, ...]) -> Tensor:
    return TracedTensor(torch.empty(shape, dtype=torch.bfloat16, device="meta"))


def _forwards(tracing: Tracing, runner: Runner, layers: int) -> Record:
    """Count the kernels of a forward of 16 rows, and of each layer."""
    cache = runner.new_cache(64)
    tree = TokenTree.chain(1, [2] * 15, [1.0] * 15)
    runner.run([Segment.of_tree(tree, cache)])  # captures the graphs
    with tracing.counting() as counts:
        runner.run([Segment.of_tree(tree, cache)])
    cache.release()
    names = counts.names
    of_layer = {name: count // layers for name, count in names.items() if count >= layers}
    return {"kernels": counts.graph_kernels, "kernels_a_layer": sum(of_layer.values()), "of_a_layer": of_layer,
            "weights_gb": round(counts.weights / 1e9, 2)}  # fmt: skip


def _plain(tracing: Tracing, runner: Runner, requests: int, temperature: float) -> Record:
    served = PlainRounds(runner, requests, temperature)
    counts = served.measure(tracing.counting, _PLAIN_ROUNDS)
    served.close()
    return _totals(requests, requests, [counts], [], _PLAIN_ROUNDS)


def _totals(requests: int, rows: int, counted: Sequence[Counts], drafts: Sequence[Counts], rounds: int = 1) -> Record:
    """Return what was counted in so many rounds, for each of them. drafts: what a head does."""
    every = [*counted, *drafts]
    return {
        "requests": requests,
        "rows": rows,
        "launches": round(sum(one.launches + one.replays for one in every) / rounds, 1),
        "waits": {
            name: round(sum(one.waits for one in some) / rounds, 2)
            for name, some in (("draft", drafts), ("receipt", counted))
        },
        "bytes_up": sum(one.up for one in every) // rounds,
        "bytes_down": sum(one.down for one in every) // rounds,
    }


def _prompt(tracing: Tracing, runner: Runner, config: LlamaConfig, states_stay: bool) -> Record:
    """Count what reading a prompt does, and the first draft after it."""
    served = Rounds(tracing.counting, runner, config, head_of("eagle3", config, _weight), 1, 0.0, states_stay)
    served.read(_PROMPT)  # captures the graphs
    read, draft = served.read(_PROMPT)
    served.close()
    return _totals(1, _PROMPT, [read], [draft])


def _round(
    tracing: Tracing,
    runner: Runner,
    config: LlamaConfig,
    requests: int,
    method: str,
    temperature: float,
    *options: Any,
) -> Record:
    """Count what a round of a head does. options: further arguments of `Rounds`."""
    head = head_of(method, config, _weight)
    served = Rounds(tracing.counting, runner, config, head, requests, temperature, *options)
    for _ in range(_ROUNDS):
        steps = served.head.steps
        parts, rows = served.step()
    steps = max(1, served.head.steps - steps)
    assert runner.pool is not None
    kv_bytes = sum(cache.length for cache in served.caches) * runner.pool.shape.block_bytes // 16
    served.close()
    drafts, rest = [parts.draft, parts.behind], [parts.read, parts.told]
    seconds = sum(map(_seconds, drafts)), _seconds(parts.forward, kv_bytes), sum(map(_seconds, rest))
    return _totals(requests, rows, [parts.forward, *rest], drafts) | {
        "draft_steps": steps,
        "a_draft_step": {
            "launches": round(sum(one.launches + one.replays for one in drafts) / steps, 1),
            "graph_kernels": round(sum(one.graph_kernels for one in drafts) / steps, 1),
            "waits": round(sum(one.waits for one in drafts) / steps, 1),
        },
        "forward_kernels": parts.forward.graph_kernels + parts.forward.launches,
        "waits_in_graphs": 0,  # tracing a graph that waits is an error
        "estimate_ms": {
            name: round(1000 * s, 2) for name, s in zip(("draft", "forward", "rest"), seconds, strict=True)
        },
        "tokens_a_round_for_sglang": round(SGLANG * sum(seconds), 2) if requests == 1 else None,
    }


def _seconds(counts: Counts, read: int = 0) -> float:
    """Estimate the seconds that an H100 takes. read: bytes that attention reads."""
    device = max(
        (counts.weights + read) / _BANDWIDTH, counts.flops / _FLOPS, counts.graph_kernels * _IN_GRAPH_S
    )  # fmt: skip
    host = (counts.launches + counts.replays) * _LAUNCH_S + counts.waits * _WAIT_S
    return device + host + (counts.up + counts.down) / _BUS
