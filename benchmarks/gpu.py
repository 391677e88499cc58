"""`python -m benchmarks.gpu`: the CUDA path's benchmark, from training data to a report. NOT RUN ON A GPU YET.

It trains a target of some 160 M parameters for a few minutes and its EAGLE-3 head on the target's own answers, runs
`talon bench` with both, and times verification and drafting at Llama-3.1-8B shapes with random weights: those are
costs, and say nothing of text or acceptance. `--tiny` goes the same way with toy models, on a CPU too; that is what
the tests do.
"""

from __future__ import annotations

import asyncio
import json
import lzma
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from drafters.training.run import train
from engine import config as configuration
from engine.errors import ConfigError, TalonError
from engine.places import ROOT
from engine.sampling import SamplingParams

from .bench import run_bench, summary
from .commands import names_in, write_report
from .costs import LLAMA_8B, TOY, Shapes, cost_table, llama, time_drafting, time_verification

METHODS = "none,pld,lookahead,suffix,recycling,eagle3,talon-tree,hybrid,talon,hf,hf-pld"


@dataclass(frozen=True)
class Plan:
    """target, head_steps, prompts: what is trained, and on how much. batch, length: rows of a step of the target's
    training, and their tokens. costs: the shapes that are timed.
    """

    target: LlamaConfig
    head_steps: int
    prompts: int
    batch: int
    length: int
    costs: Shapes


FULL = Plan(
    target=llama(1024, 12, 16, 2816, num_key_value_heads=8, max_position_embeddings=4096, tie_word_embeddings=True),
    head_steps=4000,
    prompts=12000,
    batch=32,
    length=512,
    costs=LLAMA_8B,
)
TINY = Plan(
    target=llama(64, 5, 4, 128, max_position_embeddings=1024, tie_word_embeddings=True),
    head_steps=3,
    prompts=8,
    batch=2,
    length=64,
    costs=TOY,
)


def rows_of_text(data: Path, tokenizer: Any, length: int) -> Tensor:
    """[rows, length] token ids: every prompt with its completion in the chat form, one after the other."""
    stream: list[int] = []
    with lzma.open(data, "rt", encoding="utf8") if data.suffix == ".xz" else data.open(encoding="utf8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                pair = json.loads(line)
                chat = [{"role": "user", "content": pair["prompt"]}]
                text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
                text += pair["completion"] + tokenizer.eos_token
            except (ValueError, KeyError, TypeError):
                raise ConfigError(f'data={data}: line {number} needs a "prompt" and a "completion"') from None
            stream += tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(stream) < length:
        raise ConfigError(f"data={data}: holds {len(stream)} tokens, too few to train on: give more text")
    return torch.tensor(stream[: len(stream) // length * length]).view(-1, length)


def train_target(plan: Plan, rows: Tensor, tokenizer: Any, device: str, minutes: float, out: Path) -> float:
    """Train a causal LM on `rows` for so long, save it in bfloat16 and return the last loss."""
    torch.manual_seed(0)
    plan.target.update({"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None})
    model = LlamaForCausalLM(plan.target).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    started, loss = time.monotonic(), torch.zeros(())
    for step in _steps_until(started + 60 * minutes):
        for group in optimizer.param_groups:
            spent = (time.monotonic() - started) / (60 * minutes)
            group["lr"] = 6e-4 * min(1.0, (step + 1) / 100, max(0.02, 2 * (1 - spent)))
        batch = rows[torch.randint(len(rows), (plan.batch,))].to(device)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return float(loss.detach())


def _steps_until(deadline: float) -> Iterator[int]:
    """Steps up to a moment, one at least."""
    step = 0
    while step == 0 or time.monotonic() < deadline:
        yield step
        step += 1


def main(
    data: Annotated[Path, typer.Option(help='JSONL (or .xz) with a "prompt" and a "completion" per line.')],
    questions: Annotated[list[Path], typer.Option(help="JSONL file of the Spec-Bench form; may be given again.")],
    out: Annotated[Path, typer.Option(help="Folder for models, report and costs.")] = Path("out-gpu"),
    minutes: Annotated[float, typer.Option(help="Training of the target.")] = 6.0,
    methods: Annotated[str, typer.Option(help="Comma-separated contestants.")] = METHODS,
    limit: Annotated[int, typer.Option(help="Questions per file.")] = 10,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    tokenizer: Annotated[Path, typer.Option(help="Directory of the tokenizer.")] = ROOT / "models/demo",
    tiny: Annotated[bool, typer.Option("--tiny", help="Toy models, to try the way itself, on a CPU too.")] = False,
) -> None:
    """Train a target and its head on the GPU, benchmark them, and time 8B shapes. Not run on a GPU yet."""
    try:
        run_all(TINY if tiny else FULL, data, questions, out, minutes, methods, limit, max_tokens, tokenizer, tiny)
    except TalonError as error:
        typer.echo(f"talon: {error}", err=True)
        raise typer.Exit(2) from None


def run_all(
    plan: Plan, data: Path, questions: list[Path], out: Path, minutes: float, methods: str, limit: int, max_tokens: int,
    tokenizer: Path, tiny: bool,
) -> None:  # fmt: skip
    console = Console()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not tiny:
        raise ConfigError("device='cuda': torch finds no CUDA device here; --tiny goes the same way on a CPU")
    out.mkdir(parents=True, exist_ok=True)
    words = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    target, heads = out / "target", out / "heads"
    loss = train_target(plan, rows_of_text(data, words, plan.length), words, device, minutes, target)
    console.print(f"target trained for {minutes:g} min, last loss {loss:.2f}")
    train("eagle3", str(target), data, heads / "eagle3", steps=plan.head_steps, prompts=plan.prompts, device=device)
    names = names_in(methods)
    settings = configuration.load({"model": str(target), "device": device, "dtype": "bfloat16"})
    samplings = [SamplingParams(max_tokens=max_tokens, temperature=t).validate() for t in (0.0, 1.0)]
    rows = asyncio.run(run_bench(settings, names, questions, out, limit, samplings, 1, heads, console))
    console.print(summary(rows))
    write_report(out, console)
    costs = cost_table(time_verification(plan.costs, device), time_drafting(plan.costs, device), plan.costs, device)
    console.print(costs)
    with (out / "costs.txt").open("w", encoding="utf8") as file:
        Console(file=file, width=120).print(costs)


if __name__ == "__main__":
    typer.run(main)
