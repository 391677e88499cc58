"""Training a head from end to end: the target answers, the head learns, is measured on held-out text, and saved."""

from __future__ import annotations

import contextlib
import ctypes
import json
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Column, Table
from safetensors.torch import save as to_safetensors

from drafters.heads.checkpoint import Checkpoint, coded, find_folder
from drafters.training.answers import Example, TrainingPrompt, answer_prompts, answers_name, read_training_prompts
from drafters.training.build import build
from drafters.training.features import FeatureSource, KeptFeatures, features_name, kept_states, room_for
from drafters.training.head_module import HeadModule
from drafters.training.progress import COLUMNS, Stage
from drafters.training.recipe import Recipe
from drafters.training.score import Score
from drafters.training.target import chat, load_target, target_digest
from drafters.training.trainer import Trainer, draft_vocabulary, replace_file, states_read
from engine.core.errors import ConfigError
from engine.core.params import SamplingParams
from engine.files.answer_rows import open_answers
from engine.files.prompt_file import read_prompts
from engine.install_paths import ROOT
from engine.weights.resolve import resolve

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_HEAD_FILES = ("model.safetensors", "medusa_lm_head.safetensors", "hydra_lm_head.safetensors")
CURVE = Path("training", "curve.json")
"""A run's held-out scores (`drafters.training.trainer.CurvePoint`), in the folder of its head."""
RECIPES = ROOT / "configs" / "train"


def train(
    method: str,
    target: str,
    data: Path,
    out: Path,
    recipe: Path | None = None,
    steps: int | None = None,
    prompts: int | None = None,
    resume: bool = False,
    start: Path | None = None,
    answers: Path | None = None,
    save_minutes: float = 3.0,
    device: str = "auto",
    threads: int | None = None,
    minutes: float | None = None,
    console: Console | None = None,
) -> Score:
    """Answer, train, measure, export. start: the folder of a trained head to go on from, instead of a fresh one.
    minutes: how long to train, instead of the recipe's steps.

    Returns the held-out score; raises TalonError, one line.
    """
    console = console or Console()
    _keep_freed_memory()
    if threads:
        torch.set_num_threads(threads)
    plan = Recipe.load(recipe or RECIPES / f"{method}.yaml", method, steps=steps, prompts=prompts)
    checkpoint = out / "training" / "state.pt"
    if resume and not checkpoint.is_file():
        console.print(f"{out} holds no checkpoint yet: the first step is next")
    if checkpoint.is_file() and not resume:
        raise ConfigError(f"out={out}: holds a run already: go on with --resume, or name another folder")
    head = None if start is None else Checkpoint(str(start), method, _HEAD_FILES, "start")
    folder = find_folder(resolve(target, "target"), "target")
    model, tokenizer = load_target(folder, device)
    states_read(plan, model)  # refused before hours of answering
    module = None if head is None else begun_with(head, plan, model)
    prompts_ = read_training_prompts(data, tokenizer, plan)
    try:
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={out}: cannot be made ({error.strerror}): name another folder") from None
    # shown where there is space
    figures = TextColumn("{task.fields[figures]}", table_column=Column(ratio=1, no_wrap=True))
    with Progress(*COLUMNS, figures, console=console, expand=True) as progress:
        digest, kept = target_digest(folder), answers or out.parent / "answers"
        examples = _examples(prompts_, model, tokenizer, digest, plan, kept, progress)
        if len(examples) < 2:
            raise ConfigError(f"data={data}: the target answers fewer than two of its prompts: give other prompts")
        features = _features(plan, model, examples, kept / features_name(digest, examples))
        if module is None:
            vocab_size = model.config.get_text_config().vocab_size
            module = build(plan, model, draft_vocabulary(examples, plan.draft_vocab_size, vocab_size))
        seen = 0 if head is None else drafts_seen(head.folder)
        trainer = Trainer(plan, model, module, features, seen, None if minutes is None else 60 * minutes)
        if resume and checkpoint.is_file():
            trainer.load(checkpoint)
        console.print(f"{len(trainer.training)} answers to train on, {len(trainer.held_out)} to measure on")
        if minutes is None:
            stage = Stage(progress, "training", plan.steps, trainer.step)
        else:
            stage = Stage(progress, "training, seconds", round(60 * minutes), int(trainer.trained_s))

        def judged(score: Score, best: bool) -> None:
            curve = json.dumps(trainer.curve).encode()
            replace_file(out / CURVE, curve, "the checkpoint is intact")
            console.print(
                f"step {trainer.step}, held out: {_figures(score)}  {score.chain_length():.3f} tokens a round"
            )
            if best:
                export(trainer.averaged, out, plan.stored_bits)
                write_card(out, plan, trainer.step, trainer.tokens, score)

        if head is not None and not trainer.step:
            trainer.judge(judged)  # the score that is to be beaten
        trainer.run(
            checkpoint,
            save_minutes * 60,
            lambda step, score: stage(
                step if minutes is None else int(trainer.trained_s),
                lambda: f"loss {score.mean_loss():.2f}, {score.chain_length():.2f} tokens a round",
            ),
            judged,
        )
    trainer.averaged.load_state_dict(trainer.best_state)
    score: Score = trainer.evaluate()
    console.print(acceptance_table(method, score))
    made = (
        f"the head is in {out}: talon generate PROMPT --set model={target} --method {method} --set drafter.path={out}"
    )
    console.print(made, soft_wrap=True)
    return score


def _keep_freed_memory() -> None:
    """Keep freed memory. A step's temporaries are tens of megabytes each; glibc returns such blocks to the system at
    once, and allocating them again took a third of a step's time.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, size in ((_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, (1 << 31) - 1)):
            mallopt(option, size)


def _examples(
    prompts: list[TrainingPrompt], model: Any, tokenizer: Any, digest: str, plan: Recipe, kept: Path, progress: Progress
) -> list[Example]:
    """Return the training text; prompts without an answer are answered first."""
    asked, answers = {one.text: one.tokens for one in prompts if one.answer is None}, dict[str, list[int]]()
    if asked:
        sampling = SamplingParams(temperature=plan.temperature, seed=plan.seed, max_tokens=plan.answer_tokens)
        stage, file = Stage(progress, "answering", len(asked)), kept / answers_name(digest, plan)
        answers = answer_prompts(model, tokenizer, asked, file, digest, sampling, plan.answer_batch, stage)
    examples = []
    for one in prompts:
        answer = answers[one.text] if one.answer is None else one.answer
        examples.append(Example((one.tokens + answer)[: plan.length], len(one.tokens)))
    return [example for example in examples if len(example.tokens) > example.answer + 1]


def answer_file(
    target: str,
    data: Path,
    out: Path,
    sampling: SamplingParams,
    longest: int,
    batch: int,
    minutes: float | None,
    device: str,
    console: Console,
) -> None:
    """Answer prompts of at most `longest` tokens for `talon train answers`. Raises TalonError, one line."""
    began, asked = time.monotonic(), dict.fromkeys(row.prompt for row in read_prompts(data, "data"))
    open_answers(out, target, sampling)  # refused before the target is loaded
    model, tokenizer = load_target(find_folder(resolve(target, "target"), "target"), device)
    prompts = {text: tokens for text in asked if len(tokens := chat(tokenizer, text)) <= longest}
    with Progress(console=console) as progress:
        stage = Stage(progress, "answering", len(prompts))
        answers = answer_prompts(model, tokenizer, prompts, out, target, sampling, batch, stage, minutes)
    done = sum(text in answers for text in prompts)
    seconds = time.monotonic() - began
    console.print(f"{out}: {done:,} of {len(prompts):,} prompts answered, in {seconds:.0f} s")


def _features(plan: Recipe, model: Any, examples: list[Example], folder: Path) -> FeatureSource:
    states = states_read(plan, model)
    if room_for(model, examples, states):
        return KeptFeatures(model, examples, states)
    if plan.store_features and model.device.type == "cpu":
        return KeptFeatures(model, examples, kept_states(model.config.get_text_config().num_hidden_layers), folder)
    return FeatureSource(model, examples)


def export(module: HeadModule, out: Path, bits: int = 16) -> None:
    """Write the head in its public layout, as safetensors of bfloat16, or with matrices in codes of 8 bits."""
    name, config, tensors = module.export()
    halved = {
        key: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).detach()
        for key, tensor in tensors.items()
    }
    stored = {key: tensor.cpu().contiguous() for key, tensor in (coded(halved) if bits == 8 else halved).items()}
    intact = "the training checkpoint is intact"
    replace_file(out / name, to_safetensors(stored), intact)
    replace_file(out / "config.json", (json.dumps(config, indent=2) + "\n").encode(), intact)


def write_card(out: Path, plan: Recipe, step: int, tokens: int, score: Score) -> None:
    """Write training.json into the head's folder: what it is and how good."""
    card = {
        "method": plan.method,
        "steps": step,
        "drafts_seen": tokens,
        "held_out_acceptance_by_position": [round(share, 4) for share in score.acceptance()],
        "held_out_tokens_per_round_of_a_chain": round(score.chain_length(), 3),
        "recipe": plan.model_dump(exclude_defaults=True),
    }
    replace_file(out / "training.json", (json.dumps(card, indent=2) + "\n").encode(), "the checkpoint is intact")


def begun_with(head: Checkpoint, plan: Recipe, model: Any) -> HeadModule:
    """Return a module with the weights and the draft vocabulary of a trained head."""
    vocab_size = model.config.get_text_config().vocab_size
    module = build(plan, model, head.target_ids(head.number("draft_vocab_size", vocab_size), vocab_size))
    module.begin_with(head)
    return module


def drafts_seen(folder: Path) -> int:
    """Return what the card of a trained head says; 0 if the card is missing or cannot be read."""
    try:
        return int(json.loads((folder / "training.json").read_text(encoding="utf8"))["drafts_seen"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def acceptance_table(method: str, score: Score) -> Table:
    table = Table(title=f"{method}: held-out acceptance", caption=f"{score.chain_length():.2f} tokens a round")
    for column in ("position", "tokens", "loss", "accepted"):
        table.add_column(column, justify="right")
    for position, share in enumerate(score.acceptance()):
        count = score.count[position]
        table.add_row(str(position + 1), str(count), f"{score.loss[position] / max(count, 1):.3f}", f"{share:.3f}")
    return table


def _figures(score: Score) -> str:
    losses = " ".join(f"{loss / max(count, 1):.2f}" for loss, count in zip(score.loss, score.count, strict=True))
    return f"loss {losses}  accepted {' '.join(f'{share:.2f}' for share in score.acceptance())}"
