"""The factory of drafters: the one place that knows all of them. The table of methods is `engine.core.methods`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from drafters.parts import naming_tuned, parts
from drafters.requirements import check, check_vocabulary
from engine.core.errors import ConfigError
from engine.core.methods import find, source_of
from engine.weights.installed_head import METHOD

if TYPE_CHECKING:
    from drafters.heads.head_drafter import HeadDrafter
    from drafters.hybrid.hybrid import HybridDrafter
    from engine.config import Config
    from engine.core.drafter_protocol import Drafter

__all__ = ["build", "build_for_worker", "check", "check_vocabulary", "parts"]


def build(config: Config) -> Drafter:
    """Build the drafter that `config` names."""
    method = find(config.method)
    if method.drafter is None:
        raise ConfigError(f"method={config.method}: has no drafter")
    module, name = method.drafter.split(":")
    kind = getattr(import_module(module), name)
    drafter: Drafter
    if method.merges and config.drafter.learned is not None:
        drafter = _learned(kind, config, config.drafter.learned)
    elif method.merges:
        drafter = kind.of_parts(_built(config), config)
    elif hasattr(kind, "from_config"):
        drafter = kind.from_config(config)
    else:
        from drafters.heads.head_drafter import HeadDrafter  # torch takes seconds, which only heads pay

        with naming_tuned(config):
            drafter = HeadDrafter.of_kind(kind, config)
    drafter.source = source_of(config.method)
    return drafter


def _built(config: Config) -> list[Drafter]:
    """Build each method that the configuration's drafter is made of."""
    return [build(config.model_copy(update={"method": part})) for part in parts(config)]


def _learned(hybrid: type[HybridDrafter], config: Config, folder: str) -> Drafter:
    """Build the drafter that takes over heads which appear in the folder. Where the model has none, retrieval drafts
    alone until then.
    """
    from drafters.heads.one_pass.block import BlockHead  # noqa: F401 - not in the middle of serving
    from drafters.hybrid.learned import LearnedDrafter

    def load(place: Path) -> HeadDrafter:
        named = {"path": str(place), "tuned": None}
        drafter = build(
            config.model_copy(update={"method": METHOD, "drafter": config.drafter.model_copy(update=named)})
        )
        return cast("HeadDrafter", drafter)

    built, memories = _built(config), len(config.drafter.memories)
    if len(built) == memories != 1:
        raise ConfigError(
            f"drafter.memories={list(config.drafter.memories)}: the model has no head yet, and one of them drafts "
            "until one is learned: name one, such as [suffix]"
        )
    general = built[0]
    if len(built) > memories:
        general = hybrid.of_parts(built, config)
        general.source = source_of(config.method)
    return LearnedDrafter(general, built[len(built) - memories :], load, Path(folder), config.drafter.budget)


def build_for_worker(config: Config) -> Drafter:
    """Build the drafter as `build` does; a head's probabilities are learned from verdicts where trees are
    cut by them.
    """
    drafter = build(config)
    if find(config.method).has_model and config.verifier.cut:
        from drafters.heads.head_drafter import HeadDrafter
        from drafters.hybrid.hybrid import HybridDrafter

        if isinstance(drafter, HeadDrafter):
            drafter = HybridDrafter(drafter, [], config.drafter.budget)
    return drafter


def compile_kernels(config: Config) -> None:
    """Compile what retrieval of the drafter that `config` names runs, without loading anything."""
    for method in map(find, parts(config)):
        if method.drafter is not None and not method.has_model:
            getattr(import_module(method.drafter.split(":")[0]), "compile_kernels", lambda: None)()
