"""Options shared by several benchmark commands, and their parsing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine.core.errors import ConfigError

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
AgainstOption = Annotated[
    Path | None, typer.Option(help="Folder of an earlier run: which cells agree, and which changed?")
]


def question_files(questions: list[Path] | None) -> list[Path]:
    """The files named by --questions; ConfigError if there are none, or two of one name, which names their suite."""
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
    """The names in a comma-separated option."""
    return [name.strip() for name in listed.split(",")]


def numbers_in(option: str, listed: str | None, whole: bool = False) -> list[float]:
    """The numbers in a comma-separated option, each above 0 and listed once."""
    try:
        numbers = sorted({float(number) for number in (listed or "").split(",") if number.strip()})
    except ValueError:
        numbers = [0.0]
    if (listed is not None and not numbers) or any(not 0 < n < 10_000 or (whole and n % 1) for n in numbers):
        example = "1,2,4,8,16" if whole else "0.5,0.8,1.2"
        raise ConfigError(f"--{option} {listed}: give {'whole ' if whole else ''}numbers above 0, such as {example}")
    return numbers


def gguf_file(gguf: Path | None) -> Path:
    if gguf is None or not gguf.is_file():
        raise ConfigError(f"--gguf {gguf or ''}: name the model's GGUF file, whose weights some rivals read")
    return gguf
