"""Chooses the growth policy that a configuration names."""

from __future__ import annotations

from drafters.heads.growth.policies import STATIC_TREES, Adaptive, Dynamic, Policy, Static, TalonPaperPolicy
from engine.config import DrafterConfig
from engine.core.errors import ConfigError


def policy_of(options: DrafterConfig, published: Policy, default: str = "adaptive") -> Policy:
    """Return the growth policy that a configuration describes. published: the one of the method's paper; default: the
    policy where the configuration names none. ConfigError if its trees are larger than the budget, which the verifier
    would refuse.
    """
    policy = _named(options, published, options.growth.policy or default)
    if policy.budget > options.budget:
        raise ConfigError(
            f"drafter.budget={options.budget}: the trees of drafter.growth.policy={options.growth.policy} have "
            f"{policy.budget} nodes: set drafter.budget={policy.budget}"
        )
    return policy


def _named(options: DrafterConfig, published: Policy, name: str) -> Policy:
    growth = options.growth
    if name == "static":
        return Static(STATIC_TREES[growth.tree])
    if name == "dynamic":
        return Dynamic(growth.depth, growth.top_k, options.budget)
    if name == "talon":
        return TalonPaperPolicy(options.budget, growth.top_k, growth.mu)
    if name == "adaptive":
        return Adaptive(options.budget, growth.top_k, growth.mu, growth.depth)
    return published
