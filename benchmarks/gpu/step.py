"""`python -m benchmarks.gpu.step NAME DEVICE [CHECKPOINT]`: one step; it begins when a line comes on standard input."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    name, device, *options = sys.argv[1:]
    step = importlib.import_module(f"{__package__}.{name}")
    if not sys.stdin.readline():
        return
    for record in step.run(device, *options):
        print(json.dumps(record), flush=True)
    sys.stdout.flush()
    os._exit(0)  # does not wait for threads and CUDA's libraries


if __name__ == "__main__":
    main()
