"""Options shared by several benchmark commands, and their parsing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine.core.errors import ConfigError

from ..baselines.rivals import Rivals

QuestionsOption = Annotated[
    list[Path] | None,
    typer.Option("--questions", help='JSONL with a "prompt" a line, or as Spec-Bench has it; may be given again.'),
]
HeadsOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder with the drafters' weights: block, eagle, eagle3, medusa, hydra, sps.", show_default="drafter.path"
    ),
]
MinutesOption = Annotated[
    float | None,
    typer.Option(
        help="At most so long, asking where another answer narrows an interval most.",
        show_default="until all is asked",
        min=0.0,
    ),
]
RivalsOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Compare with other engines, at --concurrency requests at once: llama.cpp, OpenVINO, vLLM, each in a "
        "virtual environment of that folder; what is not there is left out, with the line that installs it. "
        "Rows: rivals.jsonl.",
    ),
]
GgufOption = Annotated[
    list[Path] | None,
    typer.Option(help="For --rivals: the model's weights in another type; may be given again.", show_default="model"),
]
DraftOption = Annotated[
    Path | None, typer.Option(help="For --rivals: the GGUF file of a smaller model, with which others draft.")
]
AgainstOption = Annotated[
    Path | None, typer.Option(help="Folder of an earlier run: which cells agree, and which changed?")
]


def question_files(questions: list[Path] | None) -> list[Path]:
    """Return the files named by --questions; ConfigError if there are none, or two of one name, which names their
    suite.
    """
    if not questions:
        raise ConfigError('--questions: name at least one JSONL file, with a "prompt" a line')
    suites: dict[str, Path] = {}
    for file in questions:
        if file.stem in suites:
            both = f"{suites[file.stem]} and {file}"
            raise ConfigError(f"--questions: {both} would both be the suite {file.stem!r}: rename one")
        suites[file.stem] = file
    return questions


def names_in(listed: str) -> list[str]:
    """Return the names in a comma-separated option."""
    return [name.strip() for name in listed.split(",")]


def numbers_in(option: str, listed: str | None, whole: bool = False) -> list[float]:
    """Return the numbers in a comma-separated option, each above 0 and listed once."""
    try:
        numbers = sorted({float(number) for number in (listed or "").split(",") if number.strip()})
    except ValueError:
        numbers = [0.0]
    if (listed is not None and not numbers) or any(not 0 < n < 10_000 or (whole and n % 1) for n in numbers):
        example = "1,2,4,8,16" if whole else "0.5,0.8,1.2"
        raise ConfigError(f"--{option} {listed}: give {'whole ' if whole else ''}numbers above 0, such as {example}")
    return numbers


def rivals_in(folder: Path | None, gguf: list[Path] | None, draft: Path | None) -> Rivals | None:
    """Return what --rivals, --gguf and --draft say. ConfigError if a file is not there."""
    for option, file in (*(("gguf", file) for file in gguf or []), *([("draft", draft)] if draft else [])):
        if not file.is_file():
            raise ConfigError(f"--{option} {file}: no such file")
    return None if folder is None else Rivals(folder, gguf or [], draft)
