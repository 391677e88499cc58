"""Training a head on the target's own answers. The target is frozen and read only.

A run is a pure function of recipe, target and data: the examples of step n, its learning rate and its noise follow
from n, so a run that was killed and resumed ends with the same weights as one that was not. If its time is given, the
learning rate follows from the time instead, and the run takes as many steps as fit.

A step never waits for an accelerator: indices are computed here and sent there, figures are read when they are shown.
"""

from __future__ import annotations

import copy
import io
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.heads.eagle3 import fused_layers
from drafters.training.answers import Example
from drafters.training.features import FeatureSource, kept_states, sent
from drafters.training.head_module import HeadModule, Texts
from drafters.training.loss import Teacher, vocabulary_loss
from drafters.training.recipe import Recipe
from drafters.training.score import Score
from engine.core.errors import ConfigError, ModelError
from engine.files.whole_file import write_whole
from engine.model.loading import has_native_bfloat16

CurvePoint = tuple[int, float, list[float]]
"""A held-out score: the steps and the seconds trained by then, and the acceptance by position."""
EVALUATED_STEPS = 5  # draft positions in the acceptance table of heads that can draft any number

_JUDGED = 16  # times that a run of a given time is measured


class Trainer:
    """One run. target: a loaded causal LM; features: of its examples, the last of which are measured on; tokens: drafts
    that the module has seen already; limit_s: how long to train, instead of the recipe's steps. averaged: the head with
    the running mean of its weights, which is measured and kept: wherever a run stops, it is nearly as good as at the
    end of a schedule. best: the greatest held-out chain length, that of `best_state`. trained_s: how long it has been
    trained. curve: every held-out score.
    """

    def __init__(
        self,
        recipe: Recipe,
        target: Any,
        module: HeadModule,
        features: FeatureSource,
        tokens: int = 0,
        limit_s: float | None = None,
    ):
        self.recipe, self.target, self.features = recipe, target, features
        self.device: torch.device = target.device
        self.module = module.to(self.device)
        self.training, self.held_out = held_apart(features.examples, recipe.held_out)
        if module.draft_ids is not None:
            module.draft_ids = module.draft_ids.to(self.device)
        self.states = states_read(recipe, target)
        self.low_precision = self.device.type == "cuda" or has_native_bfloat16()
        head = target.get_output_embeddings().weight
        self.head = head if module.draft_ids is None else head[module.draft_ids.to(self.device)]
        self.optimizer = torch.optim.AdamW(
            [p for p in module.parameters() if p.requires_grad],
            lr=recipe.lr,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=True,
        )
        shared = {id(buffer): buffer for buffer in self.module.buffers()}  # constants, such as the target's embeddings
        self.averaged = copy.deepcopy(self.module, shared).requires_grad_(False).eval()
        self.step, self.tokens = 0, tokens
        self.limit_s, self.trained_s = limit_s, 0.0
        self._epoch, self._batches = -1, list[list[int]]()
        self.best = 0.0
        self.best_state: dict[str, Tensor] = {}
        self.curve: list[CurvePoint] = []

    def run(
        self,
        checkpoint: Path,
        save_every_s: float,
        report: Callable[[int, Score], None],
        judged: Callable[[Score, bool], None],
    ) -> None:
        """Train to the end, saving periodically and at the end. `report` is called after every step, `judged`
        with every held-out score of `averaged` and whether it is the best so far.
        """
        saved = time.monotonic()
        began = saved - self.trained_s
        while self.done < 1:
            score = self.train_step()
            report(self.step, score)
            self.trained_s = time.monotonic() - began
            if self._is_due():
                self.judge(judged)
            if time.monotonic() - saved > save_every_s or self.done >= 1:
                self.save(checkpoint)
                saved = time.monotonic()

    @property
    def done(self) -> float:
        """The share of the run that is done, from 0 on."""
        return self.step / self.recipe.steps if self.limit_s is None else self.trained_s / self.limit_s

    def _is_due(self) -> bool:
        """Return whether held-out text is to be measured: after so many steps, or shares of a run of a given time."""
        if self.done >= 1:
            return True
        if self.limit_s is None:
            return self.step % self.recipe.evaluate_every == 0
        return self.done * _JUDGED >= len(self.curve) + 1

    def judge(self, judged: Callable[[Score, bool], None]) -> None:
        """Measure on held-out text, and keep the weights if they are the best."""
        score = self.evaluate()
        self.curve.append((self.step, self.trained_s, score.acceptance()))
        best = score.chain_length() > self.best
        if best:
            self.best = score.chain_length()
            self.best_state = {name: tensor.clone() for name, tensor in self.averaged.state_dict().items()}
        judged(score, best)

    def train_step(self) -> Score:
        recipe, score = self.recipe, Score()
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.lr * schedule(self.step, self.done, recipe.warmup)
        self.module.train()
        self._loss(self._batch(self.step), recipe.unroll, score, seed=recipe.seed + self.step).backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._average()
        self.tokens += score.count[0]
        return score

    @torch.no_grad()
    def evaluate(self) -> Score:
        """Return the held-out acceptance per draft position."""
        score, size = Score(), max(8, self.recipe.batch)
        for at in range(0, len(self.held_out), size):
            self._loss(self.held_out[at : at + size], max(EVALUATED_STEPS, self.recipe.unroll), score, seed=None)
        return score

    def save(self, path: Path) -> None:
        """Save everything that `load` needs, replacing the file at once."""
        state = {
            "module": self.module.state_dict(),
            "averaged": self.averaged.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "tokens": self.tokens,
            "trained_s": self.trained_s,
            "best": self.best,
            "best_state": self.best_state,
            "curve": self.curve,
            "recipe": self.recipe.model_dump_json(),
            "examples": self.features.digest(),
            "draft_ids": self.module.draft_ids,
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        replace_file(path, buffer.getbuffer(), f"the checkpoint before step {self.step} is intact")

    def load(self, path: Path) -> None:
        """Resume from a checkpoint of the same recipe."""
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
        except (OSError, RuntimeError, EOFError) as error:
            raise ModelError(f"checkpoint={path}: cannot be read ({error}): start again without --resume") from None
        if state["recipe"] != self.recipe.model_dump_json():
            raise ConfigError(f"checkpoint={path}: belongs to another recipe: use the same recipe, or no --resume")
        if state["examples"] != self.features.digest():  # another draft vocabulary, and other steps
            raise ConfigError(f"checkpoint={path}: belongs to other data: give the same data, or no --resume")
        mine, saved = self.module.draft_ids, state.get("draft_ids")
        if mine is not None and saved is not None and not torch.equal(mine.cpu(), saved.cpu()):
            raise ConfigError(f"checkpoint={path}: began with another head: give the same --start, or no --resume")
        self.module.load_state_dict(state["module"])
        self.averaged.load_state_dict(state["averaged"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.trained_s = state["step"], state["tokens"], state.get("trained_s", 0.0)
        self.best, self.best_state, self.curve = state["best"], state["best_state"], state.get("curve", [])

    def _average(self) -> None:
        """Move the averaged weights towards the current ones; at first their mean is of all steps, then
        of the last 50.
        """
        present = [p.detach() for p in self.module.parameters()]
        torch._foreach_lerp_(list(self.averaged.parameters()), present, max(0.02, 3 / (self.step + 3)))

    def _batch(self, step: int) -> list[int]:
        """Return the examples of a step: every epoch has a new permutation, its batches of similar lengths."""
        size, total, lengths = min(self.recipe.batch, len(self.training)), len(self.training), self.features.lengths
        per_epoch = total // size
        epoch, index = divmod(step, per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.recipe.seed + epoch)
            order = torch.randperm(total, generator=generator).tolist()
            batches: list[list[int]] = []
            for at in range(0, per_epoch * size, 16 * size):
                pool = sorted(order[at : min(at + 16 * size, per_epoch * size)], key=lambda i: lengths[i])
                batches += [pool[i : i + size] for i in range(0, len(pool), size)]
            mixed = torch.randperm(per_epoch, generator=generator).tolist()
            self._epoch, self._batches = epoch, [batches[i] for i in mixed]
        return self._batches[index]

    def _loss(self, chosen: Sequence[int], steps: int, score: Score, seed: int | None) -> Tensor:
        """Return the recipe's loss of `steps` draft steps; add each step's figures to `score`. seed: None
        to measure.
        """
        recipe, module = self.recipe, self.averaged if seed is None else self.module
        examples = [self.features.examples[i] for i in chosen]
        lengths = torch.tensor([len(example.tokens) for example in examples])
        anchors, real = self._anchors(examples, seed)
        predicted = [torch.nonzero(real & (anchors + step + 2 < lengths[:, None])) for step in range(steps)]
        drafted, anchors = anchors, sent(anchors, self.device)
        known = sent(self._known(drafted, seed), self.device)
        hidden, normaliser = self.features.read(chosen, self.states)
        width = hidden.shape[1]
        padded = torch.tensor([e.tokens + [0] * (width + steps - len(e.tokens)) for e in examples])
        tokens = sent(padded, self.device)
        true = hidden[:, :, -1] if self.low_precision else hidden[:, :, -1].float()
        features = hidden[:, :-1, :-1]
        if seed is not None and recipe.feature_noise:
            noise = torch.rand(features.shape, generator=torch.Generator().manual_seed(seed)).to(features) - 0.5
            features = features + noise * recipe.feature_noise
        head = self.head.to(true.dtype)
        logits, places = self._taught(true, head, drafted, predicted)
        total = torch.zeros((), device=self.device)
        with self._autocast():
            embedded = module.embed(tokens, self.target)
            texts = Texts(features.to(true.dtype), tokens, embedded, anchors, known)
            for step, (states, guessed) in enumerate(module.draft(texts, steps)):
                if not len(predicted[step]):
                    break
                b, a = sent(predicted[step], self.device).unbind(1)
                j = anchors[b, a] + 1 + step  # hidden state j predicts token j + 1
                normalisers = None if module.draft_ids is None else normaliser[b, j]
                teacher = Teacher(true[b, j], head, normalisers, (logits, places[b, j]))
                said, previous = states[b, a], tokens[b, j]
                loss, verdicts = vocabulary_loss(
                    module.factors(said, step, previous), teacher, recipe.entropy_weight, recipe.distance_weight
                )
                best = verdicts.best if module.draft_ids is None else module.draft_ids[verdicts.best]
                score.add(step, len(b), (best == tokens[b, j + 1]).sum(), loss)
                if recipe.method == "eagle":
                    miss = F.smooth_l1_loss(guessed[b, a].float(), true[b, j].float())
                    loss = recipe.logit_weight * loss + recipe.feature_weight * miss
                if (confidence := module.confidence(said, previous)) is not None:
                    loss = loss + F.binary_cross_entropy_with_logits(confidence.float(), verdicts.overlap.clamp(0, 1))
                total = total + recipe.step_decay**step * loss
        return total

    def _taught(
        self, true: Tensor, head: Tensor, anchors: Tensor, predicted: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the target's logits at all places that drafts predict, [m, vocab], since each is predicted by several
        drafts, and where a place's are, [batch, rows]. anchors, predicted: on the CPU.
        """
        used = torch.zeros(true.shape[:2], dtype=torch.bool)
        for step, cases in enumerate(predicted):
            batch, anchor = cases.unbind(1)
            used[batch, anchors[batch, anchor] + 1 + step] = True
        batch, rows = sent(used.nonzero(), self.device).unbind(1)
        return true[batch, rows] @ head.T, sent((used.flatten().cumsum(0) - 1).view(used.shape), self.device)

    def _anchors(self, examples: Sequence[Example], seed: int | None) -> tuple[Tensor, Tensor]:
        """Return [batch, anchors] rows of the answers, in order, and which of them are not padding; both on the CPU."""
        generator = torch.Generator().manual_seed(0 if seed is None else seed)
        learns_prompts = self.module.learns_prompts and seed is not None
        rows: list[list[int]] = []
        for example in examples:
            first = 0 if learns_prompts else example.answer - 1
            count = max(1, len(example.tokens) - 2 - first)
            picked = torch.randperm(count, generator=generator)[: self.recipe.anchors or count]
            rows.append((first + picked).sort().values.tolist())
        most = max(map(len, rows))
        real = torch.tensor([[True] * len(row) + [False] * (most - len(row)) for row in rows])
        return torch.tensor([row + row[-1:] * (most - len(row)) for row in rows]), real

    def _known(self, anchors: Tensor, seed: int | None) -> Tensor:
        """Return [batch, anchors] int64, how many tokens are given: in a share of the drafts, from 1 to all but one of
        the block's.
        """
        if seed is None or not self.recipe.known_share:
            return torch.zeros_like(anchors)
        generator = torch.Generator().manual_seed(seed)
        count = torch.randint(1, max(2, self.recipe.unroll), anchors.shape, generator=generator)
        return (count * (torch.rand(anchors.shape, generator=generator) < self.recipe.known_share)).to(anchors)

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.low_precision)


def held_apart(examples: Sequence[Example], count: int) -> tuple[range, list[int]]:
    """Return the examples to train on and those to measure on: an answer to each of the last `count` prompts, at most
    half of them, whose other answers are not trained on either. Answers to one prompt follow each other.
    """
    prompts = [example.tokens[: example.answer] for example in examples]
    firsts = [i for i, prompt in enumerate(prompts) if not i or prompt != prompts[i - 1]]
    if len(firsts) < 2:
        firsts = [*range(len(examples))]
    held_out = firsts[len(firsts) - min(count, len(firsts) // 2) :]
    return range(held_out[0]), held_out


def states_read(recipe: Recipe, target: Any) -> tuple[int, ...]:
    """Return the hidden states that training reads: the head's, and the last, from which the target's distribution
    follows. ModelError if the target has too few layers.
    """
    return (*_wanted_layers(recipe, target), target.config.get_text_config().num_hidden_layers)


def _wanted_layers(recipe: Recipe, target: Any) -> tuple[int, ...]:
    layers = target.config.get_text_config().num_hidden_layers
    if recipe.method == "block":
        return kept_states(layers)[:-1]
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
    """Return [size] the most frequent tokens of the target's answers, in order of id; ties go to the smaller id."""
    if size == 0 or size >= vocab:
        return torch.arange(vocab)
    counts = torch.zeros(vocab, dtype=torch.long)
    for example in examples:
        answer = torch.tensor(example.tokens[example.answer :], dtype=torch.long)
        counts.index_add_(0, answer, torch.ones_like(answer))
    return torch.argsort(-counts, stable=True)[:size].sort().values


def schedule(step: int, done: float, warmup: int) -> float:
    """Return the share of the learning rate: linear warmup, cosine to a twentieth. done: the share of the run before
    this step.
    """
    warm = min(1.0, (step + 1) / max(warmup, 1))
    return warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))


def replace_file(path: Path, data: bytes | memoryview, intact: str) -> None:
    """Write a file of a run; the old one stays intact until the new one is complete."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    except OSError as error:
        raise ModelError(
            f"out={path}: cannot be written ({error.strerror}); {intact}: make room and run again with --resume"
        ) from error
