"""`talon profile` shows what a forward of the target spends its time on, compared with the machine's limits."""

from __future__ import annotations

import json
from functools import partial
from statistics import median

import msgspec
import torch
from rich.console import Console

from engine.config import Config
from engine.core.batch import BLOCK_SIZE, Segment
from engine.core.errors import ConfigError
from engine.core.tree import TokenTree
from engine.model.target import Target
from engine.placement import share_cores
from engine.weights.resolve import target_folder

from ..report.progress import progress_bar
from ..report.tables import Table
from .forward_parts import PARTS, Seconds, forward_name, multiplied, split, timed
from .machine_limits import Limits


class ForwardTimes(msgspec.Struct):
    """Milliseconds of a forward of `rows` rows: in total, in each part, and the least that the machine's memory and
    arithmetic allow. int8_ms: the same limit for integer products, if this machine has any.
    """

    rows: int
    total_ms: float
    products_ms: float
    attention_ms: float
    other_ms: float
    gaps_ms: float
    memory_ms: float
    arithmetic_ms: float
    int8_ms: float | None = None

    @property
    def outside(self) -> float:
        """The share of the forward that is not products."""
        return 1 - self.products_ms / self.total_ms


class Profile(msgspec.Struct):
    """The measurements of a target's forwards. weights_mb: the matrices that a forward reads, as stored in memory.
    behind: tokens of text before the rows. kv_mb: what keys and values of 1,000 tokens take, 0 if these are not pooled.
    """

    model: str
    dtype: str
    device: str
    threads: int
    forward: str
    behind: int
    weights_mb: float
    read_gb_per_s: float
    multiply_adds_per_s: float
    forwards: list[ForwardTimes]
    activations: str = "bfloat16"
    kv_type: str = "bfloat16"
    kv_mb: float = 0.0
    weights: str = "bfloat16"
    int8_multiply_adds_per_s: float | None = None


def profile_target(target: Target, rows: list[int], behind: int, repeats: int, console: Console) -> Profile:
    """Time every number of rows in turn, with the machine's limits in between, `repeats` times, and take medians.

    Each forward is run twice a turn: once unprofiled, for its total time, and once profiled, for its parts.
    """
    if behind + max(rows) > target.context:
        raise ConfigError(f"--behind {behind}: with {max(rows)} rows it exceeds the model's {target.context} positions")
    numbers = multiplied(target)
    read = target.matrix_bytes or numbers * target.dtype.itemsize
    limits = Limits(read, target.dtype, target.device)
    cache = target.new_cache(behind + max(rows))
    target.prefill(cache, [(7 + 31 * i) % target.vocab_size for i in range(behind)])
    works = {count: partial(target.run, [Segment.of_tree(_tree(count), cache)]) for count in rows}
    totals: dict[int, list[float]] = {count: [] for count in rows}
    splits: dict[int, list[Seconds]] = {count: [] for count in rows}
    with progress_bar(console) as progress:
        task = progress.add_task("profiling", total=(repeats + 1) * len(rows))
        for turn in range(repeats + 1):
            limits.measure()
            for count, work in works.items():
                totals[count].append(timed(work, target.device))
                splits[count].append(split(target, work))
                if turn == 0:  # one-time compilation and allocation do not count
                    totals[count].clear()
                    splits[count].clear()
                progress.advance(task)
    target.release(cache)
    integers = limits.int8_multiply_adds_per_s or None
    block_bytes = 0 if target.pool is None else target.pool.block_bytes
    held = block_bytes * -(-behind // BLOCK_SIZE)
    return Profile(
        target.name,
        str(target.dtype).removeprefix("torch."),
        target.device.type,
        torch.get_num_threads(),
        forward_name(target),
        behind,
        read / 1e6,
        limits.bytes_per_s / 1e9,
        limits.multiply_adds_per_s,
        [
            ForwardTimes(
                count,
                1e3 * median(totals[count]),
                **_scaled(splits[count], 1e3 * median(totals[count])),
                memory_ms=1e3 * (read + held) / limits.bytes_per_s,
                arithmetic_ms=1e3 * count * numbers / limits.multiply_adds_per_s,
                int8_ms=1e3 * count * numbers / integers if integers else None,
            )
            for count in rows
        ],
        target.activations,
        target.kv_type,
        block_bytes / BLOCK_SIZE / 1e3,
        target.weights,
        integers,
    )


def _tree(rows: int) -> TokenTree:
    """Return a tree of two candidates below each node, as in wide trees."""
    return TokenTree.from_lists([1 + i % 2 for i in range(rows)], [(i - 1) // 2 for i in range(rows)], [1.0] * rows)


def _scaled(splits: list[Seconds], total: float) -> dict[str, float]:
    """Return milliseconds of each part: its share of the profiled forwards (medians), times the unprofiled time."""
    shares = {part: median(seconds[part] / sum(seconds.values()) for seconds in splits) for part in PARTS}
    return {f"{part}_ms": total * share / sum(shares.values()) for part, share in shares.items()}


def table(profile: Profile) -> Table:
    """Make the table of milliseconds of each number of rows, and the limits of memory and of both kinds
    of arithmetic.
    """
    integers = profile.int8_multiply_adds_per_s is not None
    columns = ("rows", "total ms", *PARTS, "outside", "memory", profile.dtype, *(["int8"] if integers else []))
    lines = []
    for f in profile.forwards:
        parts = [getattr(f, f"{part}_ms") for part in PARTS]
        limits = [_figure(ms) for ms in (f.memory_ms, f.arithmetic_ms, f.int8_ms) if ms is not None]
        lines.append([str(f.rows), *map(_figure, (f.total_ms, *parts)), f"{f.outside:.0%}", *limits])
    title = "Milliseconds of a forward, the share outside products, and the limits of memory and arithmetic"
    return Table(title, columns, lines, words=0)


def _figure(ms: float) -> str:
    return f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def loaded(config: Config) -> Target:
    torch.set_num_threads(share_cores(config).verifier_alone)
    return Target.of_config(config.model_copy(update={"model": target_folder(config)}))


def show(found: Profile, as_json: bool) -> None:
    if as_json:
        print(json.dumps(msgspec.to_builtins(found), indent=2))
        return
    console = Console()
    kinds = f"weights {found.weights}, activations {found.activations}, keys and values {found.kv_type}"
    how = f"{found.dtype}, {kinds}, {found.device}, threads: {found.threads}, {found.forward}"
    console.print(f"{found.model}, {how}")
    console.print(f"Forwards after {found.behind} tokens, which read {found.weights_mb:.3g} MB of weights.")
    if found.kv_mb:
        console.print(f"Keys and values of 1,000 tokens take {found.kv_mb:.1f} MB.")
    integers = found.int8_multiply_adds_per_s
    rates = [f"reads {found.read_gb_per_s:.1f} GB/s", f"{found.multiply_adds_per_s / 1e9:.0f} billion multiply-adds/s"]
    rates += [] if integers is None else [f"{integers / 1e9:.0f} billion of 8 bits"]
    console.print(f"This machine {', '.join(rates)}.")
    console.print(table(found).rich())
