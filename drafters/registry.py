"""The methods a configuration can name. Adding a drafter: its file, one line here, one file in configs/."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.core.errors import ConfigError
from engine.core.methods import find, source_of

if TYPE_CHECKING:
    from engine.config import Config
    from engine.core.drafter_protocol import Drafter


def build(config: Config) -> Drafter:
    """The drafter that `config` names."""
    where = find(config.method).drafter
    if where is None:
        raise ConfigError(f"method={config.method}: has no drafter")
    module, name = where.split(":")
    drafter: Drafter = getattr(import_module(module), name).from_config(config)
    drafter.source = source_of(config.method)
    return drafter


def build_for_worker(config: Config) -> Drafter:
    """As `build`, but a head's chances are learned from verdicts where trees are cut by them."""
    drafter = build(config)
    if find(config.method).has_model and config.verifier.cut:
        from drafters.heads.head_drafter import HeadDrafter
        from drafters.hybrid.hybrid import HybridDrafter

        if isinstance(drafter, HeadDrafter):
            drafter = HybridDrafter(drafter, [], config.drafter.budget)
    return drafter


def check(config: Config) -> None:
    """Raise, before anything loads, the errors that the drafter of `config` would raise at once."""
    from drafters import requirements

    requirements.check(config)


def check_vocabulary(config: Config, tokenizer: Any) -> None:
    """Raise, once the target's tokenizer is loaded, if what drafts for it was made for another one."""
    from drafters import requirements

    requirements.check_vocabulary(config, tokenizer)
