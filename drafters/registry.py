"""The methods a configuration can name. Adding a drafter: its file, one line here, one file in configs/."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from drafters.base import Drafter
from engine.config import Config
from engine.errors import ConfigError


@dataclass(frozen=True)
class Method:
    """drafter: "module:class" with a `from_config`, None for plain decoding. has_model: it runs a torch model."""

    drafter: str | None
    has_model: bool = False


METHODS = {
    "none": Method(None),
    "pld": Method("drafters.prompt_lookup:PromptLookup"),
    "suffix": Method("drafters.suffix:SuffixDrafter"),
    "lookahead": Method("drafters.lookahead:Lookahead"),
    "recycling": Method("drafters.recycling:TokenRecycling"),
    "datastore": Method("drafters.datastore:DatastoreDrafter"),
    "sps": Method("drafters.small_model:SmallModel", has_model=True),
    "eagle": Method("drafters.eagle:EagleHead", has_model=True),
    "eagle3": Method("drafters.eagle3:Eagle3Head", has_model=True),
    "medusa": Method("drafters.medusa:MedusaHead", has_model=True),
    "hydra": Method("drafters.hydra:HydraHead", has_model=True),
    "block": Method("drafters.block:BlockHead", has_model=True),
    "hybrid": Method("drafters.hybrid:HybridDrafter", has_model=True),
}


def find(method: str) -> Method:
    """The method of that name; ConfigError with the nearest name otherwise."""
    if method not in METHODS:
        near = difflib.get_close_matches(method, METHODS, n=1, cutoff=0)[0]
        raise ConfigError(f"method={method!r}: unknown method; did you mean {near}? known: {', '.join(METHODS)}")
    return METHODS[method]


def build(config: Config) -> Drafter:
    """The drafter that `config` names."""
    where = find(config.method).drafter
    if where is None:
        raise ConfigError(f"method={config.method}: has no drafter")
    module, name = where.split(":")
    drafter: Drafter = getattr(import_module(module), name).from_config(config)
    return drafter


def build_for_worker(config: Config) -> Drafter:
    """As `build`, with what an earlier engine's drafter has learned, where the configuration names a file for it."""
    from drafters.experience import Experienced

    drafter, file = build(config), config.drafter.calibration
    return drafter if file is None else Experienced(drafter, Path(file))


def check(config: Config) -> None:
    """Raise, before anything loads, what the drafter of `config` would refuse at first sight."""
    from drafters import requirements

    requirements.check(config)
