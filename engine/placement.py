"""Decides where the drafter runs, and how many threads each worker has."""

from __future__ import annotations

from typing import NamedTuple

from engine.config import Config
from engine.core.methods import find
from engine.core.processor import cores, cpus


def shares_loop(config: Config) -> bool:
    """Return whether the verifier's worker also runs the drafter. In turns one of the two always waits for the other: a
    process has to be woken, a thread contends for Python's lock, and a draft model has half of the cores.
    """
    return config.mode == "sequential" and config.transport != "tcp" and find(config.method).drafter is not None


_BOTH_CORES = 4  # with fewer cores, drafting during the target's forward slows it down more than it gains


def settled(config: Config) -> tuple[Config, str | None]:
    """Return the configuration with `mode: auto` set to `sequential` if overlap cannot pay, and `transport: auto` to
    what it is on this device; and a line that says what runs beside what, where that is not the usual.

    On two cores drafting ahead was 0.4 times (`hybrid`) to 0.9 times (`block`) as fast as turns in one loop.
    """
    line = None
    elsewhere = config.transport == "tcp" or config.verifier.simulated_latency_ms > 0
    drafts = find(config.method).drafter is not None
    if config.mode == "auto" and drafts and not elsewhere and cores() < _BOTH_CORES and not on_gpu(config):
        line = f"mode=auto: drafter and verifier work in turns, as both at once would share {cores()} cores"
        config = config.model_copy(update={"mode": "sequential"})
    at_once = config.mode != "sequential" and config.transport != "tcp" and find(config.method).has_model
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


def on_gpu(config: Config) -> bool:
    """Return whether the models compute on a GPU."""
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
    beside = given.verifier_alone if config.mode == "sequential" else given.verifier_beside
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
