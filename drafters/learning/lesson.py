"""One lesson: an owner's head goes on learning from its latest texts, and is installed if it accepts more of others.

The target's hidden states of the texts are computed here anew. A lesson that was killed goes on from its last
checkpoint. A text's place, a hash of its prompt, alone decides whether a lesson may train on it, for good: so no text
is held out after it was trained on, whatever others come or go.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec
import yaml
from rich.console import Console

from drafters.heads.checkpoint import read_config
from drafters.training.answers import place_of
from drafters.training.build import inner_size
from drafters.training.features import kept_states
from drafters.training.recipe import Recipe
from drafters.training.run import CURVE, train
from drafters.training.trainer import CurvePoint
from engine.core.errors import ConfigError, ModelError
from engine.files.kept_texts import latest_ns, latest_texts
from engine.files.lessons import NOTHING_LEARNED, LearnedFolder, LessonOutcome, LessonPlan
from engine.files.prompt_file import PromptRow
from engine.files.removal import removed
from engine.files.whole_file import write_whole
from engine.model.loading import load_config
from engine.model.trial.check import not_lean
from engine.weights.installed_head import METHOD, forget_heads, install

LEAST_GAIN = 0.05  # tokens a round of a chain by which a new head must be better
_LENGTH, _ANCHORS = 1024, 64  # tokens of a text, and places in it that a step drafts from
_LEAST_ANSWER = 8  # tokens
_EPOCHS, _LEAST_STEPS, _MOST_STEPS = 8, 100, 1000
_MEASUREMENTS = 6  # on the texts held out, in a lesson
_HELD_OUT = "e"  # the first digit of the last eighth of all places
_LEAST_HELD_OUT, _MOST_HELD_OUT = 4, 32
_GOING_ON = 0.4  # of the learning rate, for a head that has learned already
_KEPT_MINUTES = 1.0  # of training that a kill may cost
_COPIES = 24  # bytes of a checkpoint of training for each parameter
_ROOM = 100e6  # bytes that are left free on the disk


def learn(plan: LessonPlan) -> LessonOutcome:
    """Do what is left of the lesson. Raises TalonError, one line; the head so far then goes on."""
    folder = LearnedFolder(Path(plan.folder))
    place = folder.lesson(plan.owner)
    for other in place.parent.glob("*"):
        if other != place:
            removed(other)
    said = place / "outcome.json"
    if not said.is_file():
        outcome = _trained(plan, folder, place)
        place.mkdir(parents=True, exist_ok=True)
        write_whole(said, msgspec.json.encode(outcome))
    outcome = msgspec.json.decode(said.read_bytes(), type=LessonOutcome)
    if outcome.installed:
        again = "wait for the next lesson"
        install(place / "head", folder.heads / plan.owner, plan.name, plan.identity, again)
        forget_heads(folder.heads)
    folder.end_lesson(plan.owner, outcome)
    return outcome


def _trained(plan: LessonPlan, folder: LearnedFolder, place: Path) -> LessonOutcome:
    """Train, from the last checkpoint if there is one, and compare with the head so far."""
    own = folder.heads / plan.owner / METHOD
    start = own if own.is_dir() else Path(plan.general) if plan.general else None
    head, data, recipe = place / "head", folder.lesson_texts(plan.owner), place / "recipe.yaml"
    if not recipe.is_file() and not _prepare(plan, folder, start, data, recipe):
        return NOTHING_LEARNED
    for unfinished in place.rglob("*.tmp"):
        removed(unfinished)
    begun = (head / "training" / "state.pt").is_file()
    score = train(
        METHOD, plan.model, data, head, recipe, resume=begun, start=start, answers=place, save_minutes=_KEPT_MINUTES,
        device="cpu", console=Console(quiet=True),
    )  # fmt: skip
    first: CurvePoint = json.loads((head / CURVE).read_text(encoding="utf8"))[0]
    used = Recipe.load(recipe, METHOD)
    before = _chain(first[2]) if first[0] == 0 else 1.0  # a head to go on from is measured before the first step
    after, texts = score.chain_length(), len(data.read_bytes().splitlines())
    return LessonOutcome(
        texts=texts, held_out=used.held_out, steps=used.steps, before=before, after=after,
        installed=after >= before + LEAST_GAIN,
    )  # fmt: skip


def _prepare(plan: LessonPlan, folder: LearnedFolder, start: Path | None, data: Path, recipe_file: Path) -> bool:
    """Write what the lesson trains with: the texts and, last of all, the recipe. Returns whether there are enough."""
    if reason := not_lean(Path(plan.model)):
        raise ModelError(
            f"model={plan.name}: does not run lean ({reason}): no head is learned for it; leave out --learn"
        )
    recipe = _recipe(plan, start)
    costs = _Costs.of(plan.model, recipe)
    checkpoints = 2 * costs.checkpoint_bytes  # while one is replaced there are two
    shelf, boundary = folder.texts / plan.owner, folder.boundary(plan.owner)
    read_ns = latest_ns(shelf)
    rows = _rows(shelf, recipe.length, int((plan.most_bytes - checkpoints) // costs.token_bytes))
    if len(rows) < 2 * _LEAST_HELD_OUT:
        raise ConfigError(
            f"--learn-gb: a lesson may take {plan.most_bytes / 1e6:,.0f} MB, of which checkpoints take "
            f"{checkpoints / 1e6:,.0f}, and {len(rows)} texts of at most {recipe.length} tokens fit: give more"
        )
    split = _split(rows, recipe.seed, boundary.read_text() if boundary.is_file() else None)
    if split is None:
        return False
    rows, held_out, first_held_out = split
    tokens = sum(len(row.prompt_tokens or ()) + len(row.tokens or ()) for row in rows)
    recipe_file.parent.mkdir(parents=True, exist_ok=True)
    needed, free = checkpoints + tokens * costs.token_bytes + _ROOM, shutil.disk_usage(recipe_file.parent).free
    if free < needed:
        raise ConfigError(
            f"--learn: a lesson needs {needed / 1e6:,.0f} MB in {plan.folder}, where {free / 1e6:,.0f} MB are left: "
            "make room, or set TALON_HOME to a folder on a larger disk"
        )
    boundary.parent.mkdir(parents=True, exist_ok=True)
    write_whole(boundary, first_held_out.encode())
    write_whole(data, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    os.utime(data, ns=(read_ns, read_ns))
    lesson = _for_texts(recipe, len(rows), held_out)
    write_whole(recipe_file, yaml.safe_dump(lesson.model_dump(exclude_defaults=True)).encode())
    return True


def _recipe(plan: LessonPlan, start: Path | None) -> Recipe:
    """Return the recipe of a tuning for texts of a server, and for the head to go on from, which has its own shape."""
    recipe = Recipe.load(Path(plan.recipe), METHOD)
    changes: dict[str, object] = {"length": max(_LENGTH, recipe.length), "anchors": min(_ANCHORS, recipe.anchors)}
    if start is not None:
        config = read_config(start, "start")
        changes |= {ours: config[its] for ours, its in _OF_HEAD.items() if its in config}
        changes |= {
            "lr": _GOING_ON * recipe.lr,
            "known_share": recipe.known_share * bool(config.get("known_beginnings")),
        }
    return recipe.model_copy(update=changes)


_OF_HEAD = {
    "layers": "num_hidden_layers",
    "unroll": "block_size",
    "markov_rank": "markov_rank",
    "intermediate_size": "intermediate_size",
}
"""Keys of a recipe, and what a head's config.json calls them."""


def _split(rows: list[PromptRow], seed: int, boundary: str | None) -> tuple[list[PromptRow], int, str] | None:
    """Return the texts of a lesson, the number of prompts that are held out, and the boundary: prompts before it are
    trained on, the last ones are held out, and what is between them is left out. Returns None if either are too few.

    boundary: None in the first lesson of an owner, which sets it: to an eighth of all places, or to as many as hold the
    least number.
    """
    places = {row.prompt: place_of(row.prompt, seed) for row in rows}
    ordered = sorted(places.values())
    if boundary is None:
        boundary = min(_HELD_OUT, ordered[-_LEAST_HELD_OUT:][0])
    trained = sum(place < boundary for place in ordered)
    held_out = min(len(ordered) - trained, trained, _MOST_HELD_OUT)
    if held_out < _LEAST_HELD_OUT:
        return None
    used = {*ordered[:trained], *ordered[-held_out:]}
    return [row for row in rows if places[row.prompt] in used], held_out, boundary


def _for_texts(recipe: Recipe, texts: int, held_out: int) -> Recipe:
    """Return the recipe with as many steps as the texts are good for, and so many of their prompts held out."""
    steps = min(max(_EPOCHS * (texts - held_out) // recipe.batch, _LEAST_STEPS), _MOST_STEPS)
    changes = {"held_out": held_out, "steps": steps, "evaluate_every": max(1, steps // _MEASUREMENTS)}
    return recipe.model_copy(update=changes | {"prompts": texts})


def _rows(shelf: Path, length: int, most_tokens: int) -> list[PromptRow]:
    """Return the latest texts that fit into so many tokens, each cut to `length`; those whose prompt leaves no room for
    an answer are left out.
    """
    rows = []
    for text in latest_texts(shelf):
        answer = text.answer[: max(0, length - len(text.prompt))]
        if len(answer) < _LEAST_ANSWER:
            continue
        if (most_tokens := most_tokens - len(text.prompt) - len(answer)) < 0:
            break
        rows.append(PromptRow(text.name, text.prompt.tolist(), answer.tolist()))
    return rows


@dataclass(frozen=True)
class _Costs:
    """What training takes on the disk. token_bytes: hidden states of a token, and its normaliser; checkpoint_bytes."""

    token_bytes: int
    checkpoint_bytes: int

    @classmethod
    def of(cls, model: str, recipe: Recipe) -> _Costs:
        config = load_config(model).get_text_config()
        hidden, states = int(config.hidden_size), len(kept_states(config.num_hidden_layers))
        layer = 4 * hidden**2 + 3 * hidden * inner_size(recipe, config)
        link = recipe.markov_rank * (2 * hidden + min(recipe.draft_vocab_size or config.vocab_size, config.vocab_size))
        parameters = recipe.layers * layer + (states + 1) * hidden**2 + link
        return cls(2 * hidden * states + 4, _COPIES * parameters)


def _chain(acceptance: list[float]) -> float:
    """Return the tokens a round of a chain, by the acceptance at each position."""
    return 1 + sum(math.prod(acceptance[: k + 1]) for k in range(len(acceptance)))
