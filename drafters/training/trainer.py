"""Training a head on the target's own answers. The target is frozen and read only.

A run is a pure function of recipe, target and data: the examples of step n, its learning rate and its noise follow
from n, so a run that was killed and resumed ends with the same weights as one that was not.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.eagle3 import fused_layers
from drafters.training.answers import Example
from drafters.training.modules import HeadModule
from drafters.training.recipe import Recipe
from engine.errors import ConfigError, ModelError
from engine.target import has_native_bfloat16
from engine.whole_file import write_whole

EVALUATED_STEPS = 5  # draft positions in the acceptance table of heads that can draft any number


@dataclass
class Score:
    """Per draft position: tokens predicted, first guesses that were right, summed loss."""

    count: list[int] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)

    def add(self, step: int, count: int, hits: int, loss: float) -> None:
        while len(self.count) <= step:
            self.count.append(0)
            self.hits.append(0)
            self.loss.append(0.0)
        self.count[step] += count
        self.hits[step] += hits
        self.loss[step] += loss * count

    def acceptance(self) -> list[float]:
        """Share of right first guesses per position, given right tokens before it."""
        return [hits / max(count, 1) for hits, count in zip(self.hits, self.count, strict=True)]

    def chain_length(self) -> float:
        """Expected tokens per round of a drafted chain, bonus included."""
        return 1 + sum(math.prod(self.acceptance()[: k + 1]) for k in range(len(self.count)))


class Trainer:
    """One run. target: a loaded causal LM; examples: training ones first, then `recipe.held_out` to measure on."""

    def __init__(self, recipe: Recipe, target: Any, module: HeadModule, examples: Sequence[Example]):
        held_out = min(recipe.held_out, len(examples) // 2)
        self.recipe, self.target, self.module = recipe, target, module.to(target.device)
        self.examples, self.held_out = examples[:-held_out], examples[-held_out:]
        self.feature_layers = wanted_layers(recipe, target)
        self.device: torch.device = target.device
        self.low_precision = self.device.type == "cuda" or has_native_bfloat16()
        self.optimizer = torch.optim.AdamW(
            module.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
        )
        self.step = 0

    def run(self, checkpoint: Path, save_every_s: float, report: Callable[[int, Score], None]) -> None:
        """Train to the last step, saving now and then and at the end; `report` is told of every step."""
        saved = time.monotonic()
        while self.step < self.recipe.steps:
            score = self.train_step()
            report(self.step, score)
            if time.monotonic() - saved > save_every_s or self.step == self.recipe.steps:
                self.save(checkpoint)
                saved = time.monotonic()

    def train_step(self) -> Score:
        recipe, score = self.recipe, Score()
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.lr * schedule(self.step, recipe)
        self.module.train()
        loss = self._loss(self._batch(self.step), recipe.unroll, score, noise_seed=recipe.seed + self.step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return score

    @torch.no_grad()
    def evaluate(self) -> Score:
        """Held-out acceptance per draft position."""
        self.module.eval()
        score = Score()
        for at in range(0, len(self.held_out), self.recipe.batch):
            self._loss(self.held_out[at : at + self.recipe.batch], EVALUATED_STEPS, score, noise_seed=None)
        return score

    def save(self, path: Path) -> None:
        """Everything `load` needs, replacing the file at once."""
        state = {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "recipe": self.recipe.model_dump_json(),
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        replace_file(path, buffer.getbuffer(), f"the checkpoint before step {self.step} is intact")

    def load(self, path: Path) -> None:
        """Go on from a checkpoint of the same recipe."""
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
        except (OSError, RuntimeError, EOFError) as error:
            raise ModelError(f"checkpoint={path}: cannot be read ({error}): start again without --resume") from None
        if state["recipe"] != self.recipe.model_dump_json():
            raise ConfigError(f"checkpoint={path}: belongs to another recipe: use the same recipe, or no --resume")
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

    def _batch(self, step: int) -> list[Example]:
        """The examples of a step: every epoch a new permutation, its batches of similar lengths."""
        size, total = min(self.recipe.batch, len(self.examples)), len(self.examples)
        per_epoch = total // size
        epoch, index = divmod(step, per_epoch)
        generator = torch.Generator().manual_seed(self.recipe.seed + epoch)
        order = torch.randperm(total, generator=generator).tolist()
        batches: list[list[int]] = []
        for at in range(0, per_epoch * size, 16 * size):
            pool = sorted(order[at : min(at + 16 * size, per_epoch * size)], key=lambda i: len(self.examples[i].tokens))
            batches += [pool[i : i + size] for i in range(0, len(pool), size)]
        chosen = batches[torch.randperm(per_epoch, generator=generator)[index]]
        return [self.examples[i] for i in chosen]

    def _loss(self, batch: Sequence[Example], steps: int, score: Score, noise_seed: int | None) -> Tensor:
        """The recipe's loss of `steps` draft steps; adds each step's figures to `score`."""
        recipe, module = self.recipe, self.module
        width = max(len(example.tokens) for example in batch)
        tokens = torch.tensor([[*e.tokens, *[0] * (width + steps - len(e.tokens))] for e in batch], device=self.device)
        # (b, j): hidden state j predicts token j + 1 of the answer, the things a head is to foresee
        first = [1 if module.learns_prompts and noise_seed is not None else max(e.answer, 2) - 1 for e in batch]
        places = [(b, j) for b, e in enumerate(batch) for j in range(first[b], len(e.tokens) - 1)]
        b, j = torch.tensor(places, device=self.device).T
        with torch.no_grad(), self._autocast():
            hidden = self.target(tokens[:, :width], output_hidden_states=True, logits_to_keep=1).hidden_states
            features = torch.stack([hidden[layer] for layer in self.feature_layers], dim=2)[:, :-1]
            true = hidden[-1][b, j]
            logits = self.target.get_output_embeddings()(true).float()
            chance = logits.softmax(-1) if module.draft_ids is None else logits.softmax(-1)[:, module.draft_ids]
            answer = tokens[b, j + 1]
            if noise_seed is not None and recipe.feature_noise:
                generator = torch.Generator().manual_seed(noise_seed)
                noise = torch.rand(features.shape, generator=generator).to(features) - 0.5
                features = features + noise * recipe.feature_noise
        total = torch.zeros((), device=self.device)
        with self._autocast():
            embedded = module.embed(tokens, self.target)
            for step, (states, guessed) in enumerate(module.unroll(features, embedded, steps)):
                seen = j - 1 - step >= 0
                if not seen.any():
                    break
                rows = (b[seen], j[seen] - 1 - step)
                predicted = module.logits(states[rows], step).float()
                loss = -(chance[seen] * predicted.log_softmax(-1)).sum(-1).mean()
                best = predicted.argmax(-1)
                best = best if module.draft_ids is None else module.draft_ids[best]
                score.add(step, len(best), int((best == answer[seen]).sum()), loss.item())
                if recipe.method == "eagle":
                    miss = F.smooth_l1_loss(guessed[rows].float(), true[seen].float())
                    loss = recipe.logit_weight * loss + recipe.feature_weight * miss
                total = total + recipe.step_decay**step * loss
        return total

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.low_precision)


def wanted_layers(recipe: Recipe, target: Any) -> tuple[int, ...]:
    """Hidden states the head reads; ModelError if the target has too few layers."""
    layers = target.config.get_text_config().num_hidden_layers
    if recipe.method != "eagle3":
        return (layers,)
    wanted = fused_layers(layers)
    if wanted[-1] < 1 or wanted[0] > layers:
        raise ModelError(
            f"target has {layers} layers, EAGLE-3 reads the states entering layers 2, L // 2 and L - 3: "
            'use a target of at least 4 layers, or "talon train eagle"'
        )
    return wanted


def draft_vocabulary(examples: Sequence[Example], size: int, vocab: int) -> Tensor:
    """[size] the target's most answered tokens, in order of id; ties go to the smaller id."""
    if size == 0 or size >= vocab:
        return torch.arange(vocab)
    counts = torch.zeros(vocab, dtype=torch.long)
    for example in examples:
        answer = torch.tensor(example.tokens[example.answer :], dtype=torch.long)
        counts.index_add_(0, answer, torch.ones_like(answer))
    return torch.argsort(-counts, stable=True)[:size].sort().values


def schedule(step: int, recipe: Recipe) -> float:
    """Share of the learning rate: linear warmup, cosine to a twentieth."""
    warm = min(1.0, (step + 1) / max(recipe.warmup, 1))
    return warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / recipe.steps)))


def replace_file(path: Path, data: bytes | memoryview, intact: str) -> None:
    """Write a file of a run; the old one is whole until the new one is."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    except OSError as error:
        raise ModelError(
            f"out={path}: cannot be written ({error.strerror}); {intact}: make room and run again with --resume"
        ) from error
