"""GGUF files as targets: each is described once by a directory in the cache, and its weights stay where they are."""

from __future__ import annotations

import errno
import glob
import os
import signal
import subprocess
import sys
from pathlib import Path

from engine.core.child_environment import child_environment
from engine.core.errors import ModelError, printable
from engine.files.progress import Report
from engine.weights.cache import home, is_intact, keep
from engine.weights.gguf.file import parts_of, read_gguf
from engine.weights.gguf.source import current_source, remember, source_of

DESCRIPTION_BYTES = 30_000_000
"""Upper bound on the size of a directory without weights."""


def described(file: Path, field: str, report: Report) -> Path:
    """Return the directory that describes a GGUF file, made once for each path and state of the file. Of a model in
    several parts, `file` is any of them.

    field: `KEY=VALUE`, for errors. Raises ModelError if the file cannot be used or the cache cannot be written.
    """
    first = parts_of(file)[0]
    known = (home() / "gguf").glob(f"{glob.escape(first.stem)}-*")
    try:
        source, states = current_source(first, str(first.parent.resolve() / first.name), known)
    except OSError:
        read_gguf(file, field)  # says what is wrong
        raise
    folder = home() / "gguf" / f"{first.stem}-{source.key}"
    origin = f"Made from `{first.name}` ({source.size:,} bytes, {first.resolve()})."

    def build(unfinished: Path) -> None:
        describe(first, unfinished, field, first.stem, origin, report)
        source.write(unfinished)

    if not (is_intact(folder) and source_of(folder) == source):
        read_gguf(file, field)  # refused before anything is written
        keep(folder, field, DESCRIPTION_BYTES, build, report, lambda made: source_of(made) == source)
    remember(folder, source, states)
    return folder


def describe(file: Path, folder: Path, field: str, title: str, origin: str, report: Report) -> None:
    """Fill `folder` with all but the weights. title, origin: for its card. Raises ModelError, and OSError where no
    space is left.
    """
    gguf = read_gguf(file, field)
    report(f"reading the configuration and tokenizer of {title}", 0, 0)
    command = [sys.executable, "-m", "engine.weights.gguf.describe_process", str(file), str(folder), title, origin]
    environment = child_environment() | {"HF_HUB_OFFLINE": "1"}
    said = b""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            while heard := os.read(process.stdout.fileno(), 1 << 16):
                said += heard
        except BaseException:
            process.kill()
            raise
    lines = [line for line in said.decode("utf8", "replace").splitlines() if line.startswith("talon: ")]
    if process.returncode == 0:
        for line in lines:
            print(printable(line), file=sys.stderr)
        return
    if process.returncode == errno.ENOSPC:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    reason = lines[-1].removeprefix("talon: ") if lines else _how_it_ended(process.returncode)
    if process.returncode == errno.EBADMSG:
        raise ModelError(f"{field}: {printable(reason)}")
    raise ModelError(
        f"{field}: cannot be read from GGUF ({printable(gguf.architecture, 60)}): {reason}; use the Hugging Face "
        "directory of this model, or another model"
    )


def _how_it_ended(code: int) -> str:
    if code == -signal.SIGBUS:  # transformers maps the file
        return "the file was cut short while it was read"
    if code < 0:
        return f"killed by signal {-code}, for want of memory perhaps"
    return f"its reader ended with code {code}"
