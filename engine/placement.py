"""Decides where the drafter runs, and how many threads each worker has."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from engine.config import Config
from engine.core.methods import METHODS, find
from engine.core.processor import cores, cpus


def shares_loop(config: Config) -> bool:
    """Return whether the verifier's worker also runs the drafter. In turns one of the two always waits for the other: a
    process has to be woken, a thread contends for Python's lock, and a draft model has half of the cores.
    """
    return config.mode == "sequential" and config.transport != "tcp" and find(config.method).drafter is not None


_BOTH_CORES = 4  # with fewer, drafting during the target's forward slows it down more than it gains
_GPU_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")  # without one of them there is no GPU


def settled(config: Config) -> tuple[Config, str | None]:
    """Set `mode: auto` to `sequential` if overlap cannot pay, and `transport: auto` to what it is on this device.
    Returns the configuration, and a line that says what runs beside what, where that is not the usual.
    """
    line, method = None, find(config.method)
    if config.mode == "auto" and method.drafter is not None and not _can_overlap(config):
        config = config.model_copy(update={"mode": "sequential"})
    at_once = config.mode != "sequential" and config.transport != "tcp" and method.has_model
    together = at_once and on_gpu(config)
    if together and config.transport == "ipc":
        line = (
            "transport=ipc: drafter and verifier are two processes, whose work a GPU does not overlap unless MPS runs; "
            "with transport=auto it does"
        )
    elif together:
        line = "drafter and verifier are threads of this process, and work on the GPU at once, in a stream each"
    if config.transport == "auto":
        config = config.model_copy(update={"transport": "inproc" if together else "ipc"})
    return config, line


def _can_overlap(config: Config) -> bool:
    """Return whether drafting while the target runs may pay, so that it is worth a trial. On a GPU it is not where
    turns leave the host little to wait for: there both want the same memory's bandwidth.

    On two cores it was 0.4 times (`hybrid`) to 0.9 times (`block`) as fast as turns in one loop, where a draft of
    retrieval takes 0.2 ms and no message is encoded.
    """
    if config.transport == "tcp" or config.verifier.simulated_latency_ms > 0:
        return True
    method = find(config.method)
    head = METHODS.get(config.drafter.head if method.merges else config.method, method)
    behind = head.behind and config.drafter.learned is None
    return method.has_model and (not behind if on_gpu(config) else cores() >= _BOTH_CORES)


def on_gpu(config: Config) -> bool:
    """Return whether the models compute on one. Where none can be, the user's process does not import torch to ask."""
    if config.device != "cuda" and "torch" not in sys.modules and not any(map(os.path.exists, _GPU_FILES)):
        return False
    from engine.model.loading import find_device

    device: str = find_device(config.device).type
    return device != "cpu"


class Threads(NamedTuple):
    """Threads of each worker's pool. verifier_alone: while no draft model computes at the same time."""

    verifier_alone: int
    verifier_beside: int
    drafter: int

    def verifier(self, ahead: bool) -> int:
        """Return the threads of the target. ahead: drafts are made while it runs."""
        return self.verifier_beside if ahead else self.verifier_alone


def share_cores(config: Config, gpu: bool = False) -> Threads:
    """Share the cores. A draft model in its own worker gets half of them; in the verifier's loop it uses the verifier's
    threads. Any other drafter needs none. More threads than cores are refused: two workers of two threads each on two
    cores were measured to run 6 to 8 times slower.

    gpu: the workers compute on one. What is left for cores is small, and threads that wait for each other make it
    slower: with 16 instead of one, eight requests' drafts at T = 1 took 28 ms a round instead of 19 beside an H100.
    """
    available, wanted = cores(), config.verifier.threads
    if gpu:
        return Threads(wanted or 1, wanted or 1, config.drafter.threads or 1)
    most = max(available, cpus())  # the most that may be asked for
    alone = min(wanted or available, most)
    if config.remote:  # the two are on different machines
        return Threads(alone, alone, min(config.drafter.threads or available, most))
    if shares_loop(config):
        return Threads(alone, alone, alone)
    if not find(config.method).has_model:
        return Threads(alone, alone, 1)
    drafter = min(config.drafter.threads or max(1, available // 2), available)
    return Threads(alone, min(wanted or available, max(1, available - drafter)), drafter)


def oversubscription(config: Config) -> str | None:
    """Return a warning if the configuration asks for threads that it does not get, else None."""
    given, asked = share_cores(config), config.drafter.threads
    if shares_loop(config) and asked is not None and asked != given.drafter:
        return f"drafter.threads={asked}: {given.drafter} used, those of the verifier, in whose loop the drafter works"
    beside = given.verifier_beside if config.mode == "async" else given.verifier_alone  # what it has at most
    for key, wanted, threads in (
        ("verifier.threads", config.verifier.threads, beside),
        ("drafter.threads", config.drafter.threads, given.drafter),
    ):
        if wanted is not None and wanted > threads:
            return (
                f"{key}={wanted}: {threads} used, since drafter and verifier share {cores()} cores; "
                "with more threads than cores both were measured to run 6 to 8 times slower"
            )
    return None
