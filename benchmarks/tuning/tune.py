"""A tuning from end to end: answers, training, measurement, installation. Each stage goes on where a kill left it."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from drafters.heads.checkpoint import find_folder
from drafters.training.build import build
from drafters.training.features import kept_states
from drafters.training.recipe import Recipe
from drafters.training.run import CURVE, RECIPES, train
from drafters.training.target import load_target
from drafters.training.trainer import draft_vocabulary, states_read
from engine.config import Config
from engine.core.errors import ConfigError, ModelError, TalonError, first_line
from engine.core.params import SamplingParams
from engine.files.prompt_file import PromptRow
from engine.files.removal import removed
from engine.files.whole_file import write_whole
from engine.model.loading import load_config
from engine.model.trial.check import not_lean
from engine.weights.cache import home
from engine.weights.identity import model_identity
from engine.weights.installed_head import METHOD, install, made_for
from engine.weights.resolve import resolved
from engine.weights.tokenizer import tokenizer_of
from engine.weights.trained import Trained, trained_for

from ..report.figures import speed_table
from .answering import LEAST as LEAST_ANSWERS
from .answering import Answering
from .journal import Progressed, TuningJournal, begin_again, key_of, worked_on_alone
from .measuring import Gain, contestants, in_use, measure
from .prompts import read_tuning_prompts

TUNE_RECIPE = RECIPES / "tune.yaml"
MEASURING = 0.15  # share of the time; what answers (`answering`) and this leave is for training
LEAST_TRAINING = 0.2  # and so much, where a slow model needs longer for the fewest answers
_KEPT_MINUTES = 1.0  # of training that a kill may cost
_ROOM = 200e6  # bytes for answers, head and rows
_COPIES = 24  # bytes of a checkpoint of training for each parameter


@dataclass(frozen=True)
class TuningPlan:
    """What was asked for. config: of the target; hours: for all of it; at_once: answers under way; again: start over,
    with the answers that there are.
    """

    config: Config
    prompts: Path
    hours: float
    at_once: int
    recipe: Path = TUNE_RECIPE
    again: bool = False


class Tuning:
    """A tuning at work. Raises TalonError, one line, wherever it cannot go on; the head in use then stays."""

    def __init__(self, plan: TuningPlan, console: Console):
        """Refuse what cannot be tuned, before hours of work."""
        self.plan, self.console = plan, console
        self.recipe = Recipe.load(plan.recipe, METHOD)
        self.config = resolved(plan.config)
        self.folder = find_folder(self.config.model, "model")
        if reason := not_lean(self.folder):
            raise ModelError(f"model={plan.config.model}: does not run lean ({reason}): no head is tuned for it")
        self.own = _known(plan.config, self.folder)
        tokenizer = tokenizer_of(self.config)
        self.prompts = read_tuning_prompts(plan.prompts, tokenizer, self.recipe.length - self.recipe.answer_tokens)
        self.identity = model_identity(str(self.folder)).hex()[:16]
        place = home() / "tuning" / f"{Path(plan.config.model).stem}-{self.identity}"
        settings = plan.config.model_dump(exclude={"model"})
        run = key_of(self.prompts.digest, plan.hours, self.recipe.model_dump_json(), settings)
        self.place, self.run = place, place / f"run-{run}"
        self.sampling = SamplingParams(
            temperature=self.recipe.temperature, seed=self.recipe.seed, max_tokens=self.recipe.answer_tokens
        )

    def work(self) -> Progressed:
        """Do what is not done yet; return what came of it."""
        with worked_on_alone(self.place):
            if self.plan.again:
                begin_again(self.run)
            self.journal = TuningJournal(self.run)
            done = self.journal.done
            if done.outcome:
                self.console.print("this was tuned before; --again starts over", soft_wrap=True)
                self._install()
                return done
            self._tell_of_the_head_in_use()
            if done.training_minutes is None:
                self._check_training()
                _free_memory()
                self._answer()
            if not done.trained:
                self._train()
                _free_memory()
            self._decide()
            self._install()
            return done

    def _tell_of_the_head_in_use(self) -> None:
        if (card := made_for(self.own.tuned)) is not None and card[1] != self.identity:
            self.console.print(
                f"talon: the head in use was made for another version of this model ({card[0]}): it goes on until a "
                "better one is there", markup=False, soft_wrap=True,
            )  # fmt: skip

    def _check_training(self) -> None:
        """Build a small head of the recipe's, which shows before hours of answers whether the structure is known."""
        _check_room(self.place, _ROOM)
        self.console.print("loading the model: can a head be trained for it?")
        model, _ = load_target(self.folder, self.config.device)
        states_read(self.recipe, model)
        try:
            vocabulary = model.config.get_text_config().vocab_size
            head = build(self.recipe, model, draft_vocabulary([], self.recipe.draft_vocab_size, vocabulary))
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise ModelError(
                f"model={self.plan.config.model}: heads are not trained for its structure ({first_line(error)}): take "
                "method=suffix"
            ) from None
        _check_room(self.place, _ROOM + _COPIES * sum(one.numel() for one in head.parameters()))

    def _answer(self) -> None:
        """Answer the prompts to train with, as many as the time allows, and write them as training reads them."""
        plan, journal, done = self.plan, self.journal, self.journal.done
        answering = Answering(self.place, self.identity, plan.config, self.config, self.recipe)
        asyncio.run(answering.answer(self.prompts.trained, plan.hours, plan.at_once, journal, self.console))
        rows, *further = answering.rows(self.prompts.trained)
        if len(rows) < LEAST_ANSWERS:
            raise ConfigError(f"prompts={plan.prompts}: the model answers {len(rows)} of them: give other prompts")
        _check_room(self.place, self._bytes_of(rows))
        for more in further:
            if shutil.disk_usage(self.place).free >= self._bytes_of([*rows, *more]):
                rows += more
        removed(journal.head)  # of a tuning that was begun again
        write_whole(journal.data, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        left = 60 * plan.hours * (1 - MEASURING) - done.answering_s / 60
        done.training_minutes = max(left, 60 * plan.hours * LEAST_TRAINING)
        journal.save()

    def _bytes_of(self, rows: Sequence[PromptRow]) -> float:
        """Return what the rows' hidden states take on the disk, and all else."""
        config = load_config(str(self.folder)).get_text_config()
        tokens = sum(len(row.prompt_tokens or ()) + len(row.tokens or ()) for row in rows)
        return _ROOM + 2 * tokens * int(config.hidden_size) * len(kept_states(config.num_hidden_layers))

    def _train(self) -> None:
        """Train the head, from its last checkpoint if there is one, and draw its curve."""
        journal, begun = self.journal, (self.journal.head / "training" / "state.pt").is_file()
        try:
            train(
                METHOD, str(self.folder), journal.data, journal.head, self.plan.recipe, resume=begun, answers=self.run,
                save_minutes=_KEPT_MINUTES, device=self.config.device, minutes=journal.done.training_minutes,
                console=self.console,
            )  # fmt: skip
        except TalonError as error:
            raise type(error)(_without_resume(str(error))) from None
        draw(journal.head / CURVE, self.run / "curve.png", self.console)
        journal.done.trained = True
        journal.save()

    def _decide(self) -> None:
        """Measure, and decide whether the head is to be installed."""
        config, journal = self.plan.config, self.journal
        minutes = 60 * self.plan.hours * MEASURING
        configs = contestants(config, journal.head)
        self._forget_rows_of_another(in_use(configs))
        asked = self.prompts.measured, self.sampling, minutes
        rows = asyncio.run(measure(configs, *asked, journal.rows, self.console))
        gain = Gain.of(rows)
        if gain.pays:
            place = self.own.tuned / METHOD
            journal.done.outcome = f"The head pays: with it answers come {gain}. It is installed in {place}."
        else:
            journal.done.outcome = (
                f"The head is not installed, since it does not surely pay: with it answers come {gain}."
            )
        journal.done.pays = gain.pays
        journal.done.method = "hybrid" if gain.pays else configs[gain.other].method
        Console().print(speed_table(rows).rich())
        journal.save()

    def _forget_rows_of_another(self, head: str) -> None:
        """Measure anew if the head in use is another than before a kill: its rows would stand among the other's."""
        journal = self.journal
        if journal.done.compared != head:
            removed(journal.rows)
            journal.done.compared = head
            journal.save()

    def _install(self) -> None:
        """Install the head if it pays and is not there, and remove what nothing reads any more. A kill may have come
        before, and a user may have removed it.
        """
        journal, done = self.journal, self.journal.done
        if done.pays and not (done.installed and (self.own.tuned / METHOD).is_dir()):
            install(journal.head, self.own.tuned, self.plan.config.model, self.identity)
            done.installed = True
            journal.save()
        journal.forget_features()


def draw(points: Path, picture: Path, console: Console) -> None:
    """Draw the curve of a training; without matplotlib, a line says how to get it."""
    try:
        from .curve import draw_curve
    except ImportError as error:
        console.print(f"no picture: {error}; pip install 'talon-decoding[bench]'", markup=False)
        return
    draw_curve(points, picture)


def _known(config: Config, folder: Path) -> Trained:
    """Return where heads for the model are. ModelError if nothing tells it from others."""
    if (own := trained_for(folder)) is None:
        raise ModelError(
            f"model={config.model}: its files have no final norm, or one of equal numbers, by which its head would "
            "be found: take method=suffix"
        )
    return own


def _without_resume(told: str) -> str:
    """Return what training tells, with the options of this command."""
    told = told.replace("run again with --resume", "run the same command again")
    reason, _, fix = told.rpartition(": ")
    return f"{reason}: add --again to start over" if "--resume" in fix else told


def _free_memory() -> None:
    """Give what a model and its training used back to the system, for the engines that come next."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _check_room(folder: Path, needed: float) -> None:
    """Raise ConfigError if the disk has less room: the kernel would end a process that writes into a mapped file."""
    if (free := shutil.disk_usage(folder).free) < needed:
        raise ConfigError(
            f"tune: needs {needed / 1e6:,.0f} MB in {folder}, where {free / 1e6:,.0f} MB are left: make room and run "
            "the same command again, or set TALON_HOME to a folder on a larger disk"
        )
