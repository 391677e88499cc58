"""Measures times of work on a GPU, by its own events."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

_WARM_UPS = 3


def median_us(work: Callable[[], Any], repeats: int = 20) -> float:
    """Return the median time of one call, in microseconds, launches included."""
    times: list[float] = []
    for _ in range(_WARM_UPS + repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end))
    middle: float = median(times[_WARM_UPS:])
    return round(middle, 1)


def replay_us(work: Callable[[], Any], calls: int, repeats: int = 10) -> float:
    """Return the time of one of `calls` calls, captured together as a graph, in microseconds: launches cost nothing
    then.
    """
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        work()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    return round(median_us(graph.replay, repeats) / calls, 1)
