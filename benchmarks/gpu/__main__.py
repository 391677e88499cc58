"""`python -m benchmarks.gpu`: the first things to find out on a GPU, the most informative first.

Every step is a process of its own with a time limit, since an error of CUDA spoils the process that it happens in: one
step's failure leaves the others alone. Steps joined by "+" run side by side, which disturbs their times. While steps
run, the next ones do their imports. Findings are JSON lines, in OUT/gpu.jsonl and, shortened, on standard output; what
else a step prints is in OUT/gpu.log. On a CPU the same steps run with small shapes, the kernels through Triton's
interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from engine.core.child_environment import child_environment

from .findings import tail

STEPS = {"card": 60, "kernels": 180, "products": 150, "counts": 60, "large": 300, "speed": 480}
"""Most seconds of each step on a GPU."""
_ORDER = "card,kernels,products+counts,large,speed"
_SHOWN = 600  # characters of a line on standard output
_LAST_WORDS_S = 1.0  # seconds for the stacks of a step that took too long


class StepProcess:
    """A step's process, which does its imports and waits for `go`."""

    def __init__(self, name: str, device: str, options: list[str], log: IO[bytes]):
        self.name, self._log, self._errors = name, log, Path(f"{log.name}.{name}")
        command = [sys.executable, "-m", f"{__package__}.step", name, device, *options]
        environment = child_environment() | {"PYTHONUNBUFFERED": "1"}
        if device == "cpu":
            environment["TRITON_INTERPRET"] = "1"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment,
                start_new_session=True,
            )  # fmt: skip

    def run(self, end_s: float, out: IO[str]) -> bool:
        """Let the process go, write its records, and end it when its time is over, or at `end_s` on the
        `time.perf_counter` clock. Returns whether nothing failed.
        """
        started, records = time.perf_counter(), _Records(self.name, out)
        limit_s = min(end_s - started, STEPS[self.name])
        try:
            status = self._finish(limit_s, records) if limit_s > 0 else None
        finally:
            self._end()
        record: dict[str, Any] = {"ended": True}
        if status != 0:
            why = f"exit status {status}" if status is not None else f"no more time after {limit_s:.0f} s"
            record = {"log": tail(self._errors.read_text(errors="replace")), "failed": why}
            if limit_s <= 0:
                record = {"failed": f"not begun: no time was left; --steps {self.name} runs it alone"}
        records.add(record | {"seconds": round(time.perf_counter() - started, 1)})
        self._log.write(f"--- {self.name}\n".encode() + self._errors.read_bytes())
        self._log.flush()
        self._errors.unlink()
        return not records.failed

    def _finish(self, limit_s: float, records: _Records) -> int | None:
        """Return its exit status; None if that did not come in time."""
        assert self._process.stdin is not None and self._process.stdout is not None
        reader = threading.Thread(target=records.read, args=[self._process.stdout], daemon=True)
        reader.start()
        with contextlib.suppress(BrokenPipeError):  # it has ended already, which its status says
            self._process.stdin.write(b"go\n")
            self._process.stdin.close()
        try:
            status = self._process.wait(limit_s)
            reader.join(_LAST_WORDS_S)
            return status
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGUSR1)  # it then prints where it is
            time.sleep(_LAST_WORDS_S)
            return None

    def _end(self) -> None:
        """Kill the process and what it started in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class _Records:
    """A step's records on their way to the file and to standard output."""

    def __init__(self, step: str, out: IO[str]):
        self._step, self._out, self.failed = step, out, False

    def read(self, lines: IO[bytes]) -> None:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                record = {"said": line.decode(errors="replace").rstrip()}
            self.add(record if isinstance(record, dict) else {"said": record})

    def add(self, record: dict[str, Any]) -> None:
        self.failed |= "failed" in record
        line = json.dumps({"step": self._step, **record})
        self._out.write(line + "\n")
        self._out.flush()
        print(line if len(line) <= _SHOWN else f"{line[: _SHOWN // 4]} ... {line[-3 * _SHOWN // 4 :]}", flush=True)


def main(
    out: Annotated[Path, typer.Option(help="Folder for gpu.jsonl and gpu.log.")] = Path("out-gpu"),
    minutes: Annotated[float, typer.Option(help="All steps together; those for which no time is left are named.")] = 10,
    steps: Annotated[str, typer.Option(help="Steps, in this order.")] = _ORDER,
    checkpoint: Annotated[
        str | None, typer.Option(help="Model for step speed.", show_default="smollm2-135m, where it is installed")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu.", show_default="cuda, if there is one")] = None,
) -> None:
    """Find out on this machine's GPU what tests on a CPU cannot show."""
    groups = [group.split("+") for group in steps.split(",")]
    if unknown := [name for group in groups for name in group if name not in STEPS]:
        typer.echo(f"talon: --steps: {unknown[0]!r} is no step; these are: {', '.join(STEPS)}", err=True)
        raise typer.Exit(2)
    out.mkdir(parents=True, exist_ok=True)
    device = device or ("cuda" if _has_gpu() else "cpu")
    options = [] if checkpoint is None else [checkpoint]
    end = time.perf_counter() + 60 * minutes
    with (out / "gpu.log").open("wb") as log, (out / "gpu.jsonl").open("w", encoding="utf8") as lines:

        def begun(group: list[str]) -> list[StepProcess]:
            return [StepProcess(name, device, options if name == "speed" else [], log) for name in group]

        with ThreadPoolExecutor(len(STEPS)) as pool:
            well, waiting = True, begun(groups[0])
            for i in range(len(groups)):
                done = [pool.submit(step.run, end, lines) for step in waiting]
                waiting = begun(groups[i + 1]) if i + 1 < len(groups) else []
                well &= min(one.result() for one in done)
    if not well:
        raise typer.Exit(1)


def _has_gpu() -> bool:
    """Return whether there is a GPU, without torch, which takes seconds to import."""
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


if __name__ == "__main__":
    typer.run(main)
