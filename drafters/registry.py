"""The methods a configuration can name. Adding a drafter: its file, one line here, one file in configs/."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError, shown
from engine.spelling import did_you_mean

if TYPE_CHECKING:
    from drafters.base import Drafter
    from engine.config import Config


@dataclass(frozen=True)
class Method:
    """drafter: "module:class" with a `from_config`, None for plain decoding. has_model: it runs a torch model.
    merges: it drafts with what `parts` names, one method that has a model and some that have none. probes: it learns
    from nodes that it does not expect to be accepted, so they must not be cut. remembers: it drafts from what earlier
    requests of the same owner were answered.
    """

    drafter: str | None
    has_model: bool = False
    merges: bool = False
    probes: bool = False
    remembers: bool = False


METHODS = {
    "none": Method(None),
    "pld": Method("drafters.prompt_lookup:PromptLookup"),
    "suffix": Method("drafters.suffix:SuffixDrafter", remembers=True),
    "lookahead": Method("drafters.lookahead:Lookahead", probes=True),
    "recycling": Method("drafters.recycling:TokenRecycling", remembers=True),
    "datastore": Method("drafters.datastore:DatastoreDrafter"),
    "sps": Method("drafters.small_model:SmallModel", has_model=True),
    "eagle": Method("drafters.eagle:EagleHead", has_model=True),
    "eagle3": Method("drafters.eagle3:Eagle3Head", has_model=True),
    "medusa": Method("drafters.medusa:MedusaHead", has_model=True),
    "hydra": Method("drafters.hydra:HydraHead", has_model=True),
    "block": Method("drafters.block:BlockHead", has_model=True),
    "hybrid": Method("drafters.hybrid:HybridDrafter", has_model=True, merges=True),
}


def find(method: str, key: str = "method") -> Method:
    """The method of that name; ConfigError with the nearest name otherwise. key: where it is named."""
    if method not in METHODS:
        meant = did_you_mean(method, METHODS) or ";"
        raise ConfigError(f"{key}={shown(method)}: unknown method{meant} known: {', '.join(METHODS)}")
    return METHODS[method]


def parts(config: Config) -> tuple[str, ...]:
    """The methods that the configuration's drafter is made of; ConfigError if they do not go together."""
    if not find(config.method).merges:
        return (config.method,)
    head, memories = config.drafter.head, config.drafter.memories
    for key, name, model in [("head", head, True), *(("memories", name, False) for name in memories)]:
        fitting = [n for n, m in METHODS.items() if m.drafter and not (m.merges or m.probes) and m.has_model == model]
        find(name, f"drafter.{key}")
        if name not in fitting:
            raise ConfigError(f"drafter.{key}={shown(name)}: cannot stand there; these can: {', '.join(fitting)}")
    return (head, *memories)


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
        from drafters.head_drafter import HeadDrafter
        from drafters.hybrid import HybridDrafter

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


def source_of(method: str) -> int:
    """The bit that marks the nodes which the method proposes."""
    return 1 << list(METHODS).index(method)


def source_names(bits: int) -> list[str]:
    """The methods that proposed a node."""
    return [name for name in METHODS if bits & source_of(name)]
