"""`talon check --against float32`: how far rounding moves a model's logits, in bfloat16 and with rows of 8 bits.

The reference is transformers' own forward in float32 with the weights that the model's files hold, not rounded, also
where `weights` quantises them. All read the same tokens: the last ones of each prompt, and the answer to it that plain
decoding gives as configured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from engine.config import Activations, Config
from engine.core.batch import Segment
from engine.model.loading import find_device, load_model, weights_of
from engine.model.target import Target
from engine.text.encode import encode_text
from engine.weights.gguf.source import open_gguf
from engine.weights.quantised import unquantised
from engine.weights.resolve import resolved
from engine.weights.tokenizer import tokenizer_of

from ..inputs.questions import read_questions
from ..report.progress import progress_bar
from ..report.tables import Table

_PROMPT = 420  # tokens that are read of a prompt
_PROMPT_ROWS = 64  # of these, so many are compared: logits of all would fill the memory
Item = TypeVar("Item")
_KINDS: tuple[Activations, ...] = ("bfloat16", "int8")


class Text(NamedTuple):
    """Tokens of a prompt and of its answer."""

    prompt: list[int]
    answer: list[int]


class LogitAgreement(NamedTuple):
    """How logits agree with those of float32. differs: share of positions where another token is the likeliest.
    divergence: mean of the Kullback-Leibler divergence from float32's distribution, in nats.
    """

    positions: int
    differs: float
    divergence: float


class Precision(NamedTuple):
    activations: Activations
    answers: LogitAgreement
    prompts: LogitAgreement


def measure_precision(
    config: Config, files: Sequence[Path], limit: int | None, max_tokens: int, console: Console
) -> list[Precision]:
    """Measure each way of taking rows. A model without matrices in blocks has one way. One model is in memory at a
    time.
    """
    config = resolved(config)
    tokenizer = tokenizer_of(config)
    prompts = [encode_text(tokenizer, q.prompt)[-_PROMPT:] for file in files for q in read_questions(file, limit)]
    with progress_bar(console) as progress:
        target = Target.of_config(config)
        texts = [Text(prompt, _answer(target, prompt, max_tokens)) for prompt in _told(progress, "answers", prompts)]
        del target
        found: dict[Activations, list[Tensor]] = {}
        for kind in _KINDS:
            kv_type = config.verifier.kv_type
            target = Target.load(config.model, config.dtype, config.device, activations=kind, kv_type=kv_type)
            if target.activations == kind:
                found[kind] = [_logits(target, text) for text in _told(progress, kind, texts)]
            del target
        sums = {kind: _Sums() for kind in found}
        for number, (text, expected) in enumerate(zip(texts, _expected(config, texts, progress), strict=True)):
            for kind, logits in found.items():
                sums[kind].add(expected, logits[number].float(), len(text.answer))
    return [Precision(kind, *sums[kind].means()) for kind in found]


def precision_table(rows: Sequence[Precision]) -> Table:
    columns = ("activations", "answers: differs", "KL", "positions", "prompts: differs", "KL", "positions")
    cells = [(row.activations, *_cells(row.answers), *_cells(row.prompts)) for row in rows]
    return Table("Against float32 with the files' own weights", columns, cells)


def _cells(found: LogitAgreement) -> tuple[str, str, str]:
    return f"{found.differs:.1%}", f"{found.divergence:.4f}", str(found.positions)


class _Sums:
    def __init__(self) -> None:
        self._sums = torch.zeros(2, 3, dtype=torch.float64)  # of answers and prompts: positions, others, divergences

    def add(self, expected: Tensor, logits: Tensor, answered: int) -> None:
        """Add a text. expected, logits: [positions, vocab], the last `answered` of an answer."""
        p, q = expected.log_softmax(-1), logits.log_softmax(-1)
        divergence = (p.exp() * (p - q)).sum(-1).double()
        differs = (expected.argmax(-1) != logits.argmax(-1)).double()
        rows = torch.stack([torch.ones_like(differs), differs, divergence], dim=1)
        split = len(rows) - answered
        self._sums += torch.stack([rows[split:].sum(0), rows[:split].sum(0)])

    def means(self) -> list[LogitAgreement]:
        return [LogitAgreement(int(n), other / max(1, n), far / max(1, n)) for n, other, far in self._sums.tolist()]


def _told(progress: Progress, name: str, items: Sequence[Item]) -> Iterator[Item]:
    task = progress.add_task(name, total=len(items))
    for item in items:
        yield item
        progress.advance(task)


def _rows(text: Text) -> slice:
    """Return the positions whose logits are compared."""
    end = len(text.prompt) - 1
    return slice(max(0, end - _PROMPT_ROWS), end + len(text.answer))


def _answer(target: Target, prompt: list[int], max_tokens: int) -> list[int]:
    """Return the likeliest tokens."""
    cache, answer = target.new_cache(len(prompt) + max_tokens), list[int]()
    logits, _ = target.prefill(cache, prompt)
    while len(answer) < max_tokens:
        answer.append(int(logits.argmax()))
        if answer[-1] in target.eos_tokens:
            break
        both, _ = target.run([Segment.of_text(answer[-1:], cache)])
        cache.commit([0])
        logits = both[0]
    target.release(cache)
    return answer


def _logits(target: Target, text: Text) -> Tensor:
    """Return [positions, vocab] in the model's type."""
    tokens = text.prompt + text.answer
    cache = target.new_cache(len(tokens))
    logits, _ = target.run([Segment.of_text(tokens, cache, wanted="all")])
    target.release(cache)
    return logits[_rows(text)].clone()


def _expected(config: Config, texts: Sequence[Text], progress: Progress) -> Iterator[Tensor]:
    """Yield [positions, vocab] float32 of each text."""
    model = load_model(str(unquantised(Path(config.model))), "float32", find_device("cpu"))
    if (gguf := open_gguf(Path(config.model))) is not None:
        weights = weights_of(gguf, model)
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.data = weights.matrix(name).values(torch.float32)
    for text in _told(progress, "float32", texts):
        rows = _rows(text)
        with torch.inference_mode():
            logits: Tensor = model.lm_head(model.model(torch.tensor([text.prompt + text.answer]))[0][0, rows])
        yield logits
