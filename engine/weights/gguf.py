"""GGUF files as targets: each is converted once to a bfloat16 Hugging Face directory in the cache."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

from engine.core.child_environment import child_environment
from engine.core.errors import ModelError, printable
from engine.weights.cache import home, keep
from engine.weights.gguf_file import GgufFile, read_gguf
from engine.weights.progress import Report

_FORMAT = 5
"""Raise it when the conversion changes: files are then converted again."""
_STEP = re.compile(rb"(\d+)/(\d+) \[")
_TOKENIZER_BYTES = 30_000_000


def converted(file: Path, field: str, report: Report) -> Path:
    """The directory converted from a GGUF file, once for each path, size and modification time of the file.

    field: `KEY=VALUE`, for errors. Raises ModelError if the file cannot be used or the cache cannot be written.
    """
    try:
        state = file.stat()
    except OSError as error:
        raise ModelError(f"{field}: cannot be read: {error.strerror}; name a GGUF file that is there") from error
    key = f"{_FORMAT} {file.resolve()} {state.st_size} {state.st_mtime_ns}"
    folder = home() / "gguf" / f"{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    gguf = read_gguf(file, field)
    origin = f"Made from `{file.name}` ({state.st_size:,} bytes, {file.resolve()})."

    def build(unfinished: Path) -> None:
        convert(gguf, unfinished, field, file.stem, origin, report)

    return keep(folder, field, room_for(gguf), build, report)


def room_for(gguf: GgufFile) -> int:
    """Upper bound on the converted directory's bytes: bfloat16, and blocks of up to 9 bits a weight."""
    return gguf.elements * (16 + 9) // 8 + _TOKENIZER_BYTES


def convert(gguf: GgufFile, folder: Path, field: str, title: str, origin: str, report: Report) -> None:
    """Fill `folder` with the model as bfloat16. title, origin: for its card. Raises ModelError."""
    stage, done = f"converting {title} to bfloat16", 0.0
    command = [sys.executable, "-m", "engine.weights.dequantise", str(gguf.path), str(folder), title, origin]
    environment = child_environment() | {"HF_HUB_OFFLINE": "1"}
    said = b""
    report(stage, done, 1)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            while heard := os.read(process.stdout.fileno(), 1 << 16):
                said += heard
                for step, steps in _STEP.findall(heard):  # transformers' progress bars, one after the other
                    done = max(done, int(step) / max(int(steps), 1))
                report(stage, done, 1)
        except BaseException:
            process.kill()
            raise
    lines = [line for line in said.decode("utf8", "replace").splitlines() if line.startswith("talon: ")]
    if process.returncode == 0:
        for line in lines:
            print(printable(line), file=sys.stderr)
        return
    reason = lines[-1].removeprefix("talon: ") if lines else _how_it_ended(process.returncode)
    raise ModelError(
        f"{field}: cannot be converted from GGUF ({printable(gguf.architecture, 60)}): {reason}; use the Hugging Face "
        "directory of this model, or another model"
    )


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"killed by signal {-code}, for want of memory perhaps"
    return f"the conversion ended with code {code}"
