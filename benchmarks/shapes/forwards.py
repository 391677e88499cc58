"""The times of forwards: Talon's, of a file's target without a server, and those of `llama-bench`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec

from engine.core.errors import ConfigError
from engine.core.tree import TokenTree
from engine.model.target import Target

from ..measure.forward_parts import timed

_BEHIND, _PROMPT, _TREES = 128, 512, (8, 16, 32)
_ROOM = 2048  # positions
_PATH = (0, 1, 3, 7)  # accepted of a tree in which each node has two children


class ForwardFigures(msgspec.Struct):
    """Milliseconds of a plain token and of trees by their nodes, the replay of what was accepted before included, and
    tokens a second of a prompt of 512.
    """

    token_ms: float
    prompt_tokens_per_s: float
    tree_ms: dict[int, float] = {}


def time_forwards(target: Target, repeats: int) -> ForwardFigures:
    """Take medians of `repeats` forwards; the first of each kind does not count."""
    tokens = [(7 + 31 * i) % target.vocab_size for i in range(_PROMPT)]
    cache = target.new_cache(_ROOM)
    target.prefill(cache, tokens[:_BEHIND])

    def tree(nodes: int) -> None:
        parents = [(node - 1) // 2 for node in range(nodes)]
        target.verify(cache, TokenTree.from_lists(tokens[:nodes], parents, [1.0] * nodes))
        cache.commit(_PATH if nodes > 1 else [0])

    def prompt() -> None:
        fresh = target.new_cache(_PROMPT)
        target.prefill(fresh, tokens)
        target.release(fresh)

    def seconds(work: Callable[[], None]) -> float:
        return median([timed(work, target.device) for _ in range(repeats + 1)][1:])

    token_s, trees = seconds(lambda: tree(1)), {nodes: seconds(lambda: tree(nodes)) for nodes in _TREES}  # noqa: B023
    target.release(cache)
    return ForwardFigures(1e3 * token_s, _PROMPT / seconds(prompt), {nodes: 1e3 * s for nodes, s in trees.items()})


def llama_bench(program: Path, file: Path, threads: int, repeats: int) -> ForwardFigures:
    """Run `llama-bench` on the same prompt and on 32 plain tokens."""
    command = [str(program), "-m", str(file), "-t", str(threads), "-p", str(_PROMPT), "-n", "32", "-o", "json"]
    done = subprocess.run([*command, "-r", str(repeats)], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"--llama-bench {program}: {(done.stderr.strip().splitlines() or ['it failed'])[-1]}")
    rates = {bool(row["n_gen"]): row["avg_ts"] for row in json.loads(done.stdout)}
    return ForwardFigures(1e3 / rates[True], rates[False])
