"""The growth policy that a configuration names."""

from __future__ import annotations

from drafters.growth import STATIC_TREES, Adaptive, Dynamic, Policy, Static, Talon
from engine.config import DrafterConfig


def policy_of(options: DrafterConfig, published: Policy, default: str = "adaptive") -> Policy:
    """The growth policy that a configuration describes. published: the one of the method's paper; default: where the
    configuration names none.
    """
    growth = options.growth
    name = growth.policy or default
    if name == "static":
        return Static(STATIC_TREES[growth.tree])
    if name == "dynamic":
        return Dynamic(growth.depth, growth.top_k, options.budget)
    if name == "talon":
        return Talon(options.budget, growth.top_k, growth.mu, growth.ungated)
    if name == "adaptive":
        return Adaptive(options.budget, growth.top_k, growth.mu, growth.gate)
    return published
