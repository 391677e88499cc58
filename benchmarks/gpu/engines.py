"""Runs engines on a small random model. Every method, mode and transport has to give the texts of plain decoding of one
request at a time, greedy, at T = 1 and at T = 25, where noise decides, which heads share. Several requests run at once.
Each engine has a process of its own, and several run side by side.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from engine.api import Engine
from engine.core.methods import find
from engine.core.params import SamplingParams

from .findings import Record, tail, tried
from .models import HEADS, save_head, save_small

_PROMPTS = [list(text) for text in (b"the cat sat on the mat, the cat", b"1 + 1 = 2, 1 + 2 =", b"zz" * 50, b"a" * 600)]
_SAMPLINGS = [SamplingParams(max_tokens=48, ignore_eos=True, temperature=t, seed=5) for t in (0.0, 1.0, 25.0)]
_SIDE_BY_SIDE = 6
_LIMIT_S = 75.0  # seconds of an engine
_SETTINGS = [  # method, mode, transport, type; the most informative first
    ("none", "sequential", "inproc", "bfloat16"),
    ("none", "sequential", "ipc", "bfloat16"),
    ("eagle3", "async", "inproc", "bfloat16"),
    ("pld", "async", "ipc", "bfloat16"),
    ("eagle3", "async", "ipc", "bfloat16"),
    ("block", "async", "inproc", "bfloat16"),
    ("eagle3", "sequential", "inproc", "bfloat16"),
    ("hybrid", "auto", "ipc", "bfloat16"),
    ("medusa", "async", "inproc", "bfloat16"),
    ("hydra", "sequential", "ipc", "bfloat16"),
    ("eagle", "async", "inproc", "bfloat16"),
    ("sps", "async", "inproc", "bfloat16"),
    ("block", "sequential", "ipc", "bfloat16"),
    ("suffix", "sequential", "tcp", "bfloat16"),
    ("none", "sequential", "inproc", "float32"),
    ("eagle3", "async", "ipc", "float32"),
    ("recycling", "async", "inproc", "bfloat16"),
    ("lookahead", "sequential", "inproc", "bfloat16"),
]
_ON_A_CPU = (0, 2)  # the settings that run on a CPU


def run(device: str) -> Iterator[Record]:
    chosen = {i: _SETTINGS[i] for i in (range(len(_SETTINGS)) if device == "cuda" else _ON_A_CPU)}
    plain: dict[str, list[list[int]]] = {}  # by type
    early: list[Record] = []  # records that came before there was something to compare with
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(_SIDE_BY_SIDE if device == "cuda" else 1) as pool:
        yield tried("models", _save, Path(folder), device)
        done = {pool.submit(tried, ", ".join(one), _apart, folder, device, i): one for i, one in chosen.items()}
        for one in as_completed(done):
            record, (method, _, transport, dtype) = one.result(), done[one]
            texts = record.pop("texts", None)
            if texts is not None and (method, transport) == ("none", "inproc"):
                plain[dtype] = texts
            if texts is not None and dtype in plain:
                record |= _compared(texts, plain[dtype])
            elif texts is not None:
                early.append({"check": record["check"], "dtype": dtype, "texts": texts})
            yield record
            for record in [r for r in early if r["dtype"] in plain]:
                early.remove(record)
                yield {"check": record["check"], **_compared(record["texts"], plain[record["dtype"]])}
        if early:
            yield {"failed": f"no texts of plain decoding to compare these with: {[r['check'] for r in early]}"}


def _compared(texts: list[list[int]], expected: list[list[int]]) -> Record:
    different = [i for i, text in enumerate(texts) if text != expected[i]]
    told = {"equal": f"{len(texts) - len(different)} of {len(texts)}"}
    return told | ({"failed": f"texts {different} differ"} if different else {})


def _save(folder: Path, device: str) -> Record:
    model = save_small(folder / "model", device == "cpu")
    config = AutoConfig.from_pretrained(model)
    for head in HEADS:
        save_head(head, config, folder / head, "cpu")
    return {"heads": HEADS}


def _apart(folder: str, device: str, index: int) -> Record:
    """Return what an engine in a process of its own says of itself."""
    command = [sys.executable, "-m", __name__, folder, device, str(index)]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        said = error.stderr or b""
        return {"failed": f"took longer than {_LIMIT_S:g} s", "log": tail(said.decode(errors="replace"))}
    if done.returncode:
        return {"failed": tail(done.stderr)}
    found: Record = json.loads(done.stdout.splitlines()[-1])
    return found | {"said": tail(done.stderr)} if done.stderr else found


async def answer(folder: Path, device: str, index: int) -> Record:
    """Answer with one setting, the first of all one request at a time, and return the texts."""
    method, mode, transport, dtype = _SETTINGS[index]
    drafter: dict[str, Any] = {"answers": None}
    if find(method).has_model:
        drafter["path"] = str(folder / {"sps": "model", "hybrid": "eagle3"}.get(method, method))
    settings = {
        "model": str(folder / "model"), "device": device, "dtype": dtype, "method": method, "mode": mode,
        "transport": transport, "drafter": drafter, "tcp": {"insecure": True},
        "verifier": {"kv_memory": 256 << 20, "cut": find(method).merges},  # uncut, a head never rests
    }  # fmt: skip
    started = time.perf_counter()
    async with await Engine.start(settings) as engine:
        start_s, asked = time.perf_counter() - started, [(prompt, way) for prompt in _PROMPTS for way in _SAMPLINGS]
        started = time.perf_counter()
        if method == "none" and transport == "inproc":
            results = [await engine.generate(*one) for one in asked]
        else:
            results = list(await asyncio.gather(*(engine.generate(*one) for one in asked)))
        seconds = time.perf_counter() - started
        return {
            "exact": engine.target.exact,
            "inexact": engine.target.inexact,
            "tokens_per_round": round(sum(r.metrics.mean_accepted_tokens for r in results) / len(results), 2),
            "tokens_per_s": round(sum(len(r.token_ids) for r in results) / seconds, 1),
            "start_s": round(start_s, 1),
            "texts": [r.token_ids for r in results],
        }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(answer(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))), flush=True)
    os._exit(0)
