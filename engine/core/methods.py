"""The methods a configuration can name. To add a drafter, write its file and a line here, with a bit that is free."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from engine.core.errors import ConfigError, did_you_mean, shown


@dataclass(frozen=True)
class Method:
    """A way to draft that a configuration can name.

    drafter: "module:class", a `Head` or a drafter with a `from_config`; None for plain decoding. has_model: it runs a
    torch model. merges: it drafts with what `drafters.parts` names, one method that has a model and some that have
    none. probes: it learns from nodes that it does not expect to be accepted, so they must not be cut. remembers: it
    drafts from what earlier requests of the same owner were answered. reads_keys: it needs the target's keys and
    values, which the lean decoder alone gives. behind: on a GPU it drafts behind the target's walks
    (`Drafter.draft_behind`), for which both take turns in one loop. bit: its place among the bits of
    `TokenTree.source`, 0 to 31, by which messages name it; drafters that are not in the table share the last one.
    """

    drafter: str | None
    has_model: bool = False
    merges: bool = False
    probes: bool = False
    remembers: bool = False
    reads_keys: bool = False
    behind: bool = False
    bit: int = 31


METHODS = {
    "none": Method(None, bit=0),
    "pld": Method("drafters.lookup.prompt_lookup:PromptLookup", bit=1),
    "suffix": Method("drafters.lookup.suffix:SuffixDrafter", remembers=True, bit=2),
    "lookahead": Method("drafters.lookup.lookahead:Lookahead", probes=True, bit=3),
    "recycling": Method("drafters.lookup.recycling:TokenRecycling", remembers=True, bit=4),
    "datastore": Method("drafters.lookup.datastore:DatastoreDrafter", bit=5),
    "sps": Method("drafters.small_model:SmallModel", has_model=True, bit=6),
    "eagle": Method("drafters.heads.eagle:EagleHead", has_model=True, behind=True, bit=7),
    "eagle3": Method("drafters.heads.eagle3:Eagle3Head", has_model=True, behind=True, bit=8),
    "medusa": Method("drafters.heads.medusa:MedusaHead", has_model=True, bit=9),
    "hydra": Method("drafters.heads.hydra:HydraHead", has_model=True, bit=10),
    "block": Method("drafters.heads.one_pass.block:BlockHead", has_model=True, behind=True, bit=11),
    "hybrid": Method("drafters.hybrid.hybrid:HybridDrafter", has_model=True, merges=True, bit=12),
    "mtp": Method("drafters.heads.mtp.head:MtpHead", has_model=True, bit=13),
    "assistant": Method("drafters.heads.assistant.head:AssistantHead", has_model=True, reads_keys=True, bit=14),
}


def find(method: str, key: str = "method") -> Method:
    """Return the method of that name; ConfigError with the nearest name otherwise. key: where it is named."""
    if method not in METHODS:
        meant = did_you_mean(method, METHODS) or ";"
        raise ConfigError(f"{key}={shown(method)}: unknown method{meant} known: {', '.join(METHODS)}")
    return METHODS[method]


def source_of(method: str) -> int:
    """Return the bit that marks the nodes which the method proposes."""
    return 1 << METHODS[method].bit


MODELS = sum(source_of(name) for name, method in METHODS.items() if method.has_model)
"""The bits of all methods that run a model."""


def source_names(bits: int) -> list[str]:
    """Return the methods that proposed a node."""
    return [name for name in METHODS if bits & source_of(name)]


GRAMMAR = 1 << 32
"""The bit of `Tokens.sources` for a token that the request's grammar forced. The lower bits are the drafters', as in a
`TokenTree`.
"""


@cache
def source_name(bits: int) -> str:
    """Return the source named for a token: grammar takes precedence over a head, a head over retrieval."""
    if bits & GRAMMAR:
        return "grammar"
    models = [METHODS[name].has_model for name in source_names(bits)]
    return "target" if not models else "head" if any(models) else "retrieval"
