"""A file of answers: a line each. It also reads the answers that a killed run has left."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec

from engine.core.errors import ConfigError
from engine.core.params import SamplingParams
from engine.files.json_lines import BadLine, json_lines


class AnswerRow(msgspec.Struct, kw_only=True):
    """A line of the file. model: as configured; it and max_tokens are None in files written before they were recorded.
    tokens: the answer's, including the end-of-sequence token if it ended with one; text: the same without special
    tokens.
    """

    prompt: str
    model: str | None = None
    max_tokens: int | None = None
    temperature: float
    seed: int
    finish_reason: str
    text: str
    tokens: list[int]

    @classmethod
    def of(
        cls, prompt: str, model: str, sampling: SamplingParams, finish_reason: str, text: str, tokens: list[int]
    ) -> AnswerRow:
        """Make the row of an answer by that model with that sampling."""
        return cls(
            prompt=prompt,
            model=model,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            seed=sampling.seed,
            finish_reason=finish_reason,
            text=text,
            tokens=tokens,
        )


_BEGINNING = b'{"prompt":"'  # every line written here begins so


def open_answers(path: Path, model: str, sampling: SamplingParams) -> dict[str, list[int]]:
    """Create the file if it does not exist, and return the answers that it has of this model and sampling, by prompt. A
    partial last line, left by a killed run, is cut off. Raises ConfigError for any other file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.seek(0)
            content = file.read()
            whole = content.rfind(b"\n") + 1
            rows = [row for _, row in json_lines(io.BytesIO(content[:whole]), AnswerRow)]
            if not content[whole:].startswith(_BEGINNING[: len(content) - whole]):
                raise BadLine(content.count(b"\n") + 1, "is no answer")
            file.truncate(whole)
    except BadLine as error:
        raise ConfigError(f"out={path}: is no file of answers ({error}); name another file") from None
    except OSError as error:
        raise ConfigError(f"out={path}: cannot be written: {error.strerror or error}; name another file") from None
    for row in rows:
        theirs = (row.model, row.max_tokens, row.temperature, row.seed)
        if theirs != (model, sampling.max_tokens, sampling.temperature, sampling.seed):
            raise ConfigError(
                f"out={path}: holds answers of model {row.model or 'unknown'}, max_tokens "
                f"{row.max_tokens or 'unknown'}, temperature {row.temperature:g} and seed {row.seed}; name another file"
            )
    return {row.prompt: row.tokens for row in rows}
