"""Reads how a router chooses experts, by trying it with numbers of our own."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from engine.model.structure import OtherStructure

CORRECTION = "e_score_correction_bias"
"""What is added to an expert's score where experts are chosen, and is no part of its share."""
_SCALES = ("routed_scaling_factor", "route_scale")
_ROWS = 16
_MOST_GROUPS = 63  # a kernel notes in a word which ones are chosen
_TINY = -16.0  # a logit whose sigmoid is 1e-7


class Routing(NamedTuple):
    """See `ExpertMlp`."""

    sigmoid: bool
    normalised: bool
    groups: int = 1
    top_groups: int = 1
    counted: int = 1
    least: float = 1e-20  # as DeepSeek's routers have it


def routing_of(router: Any) -> Routing:
    """Return how a router chooses. Raises OtherStructure if it chooses in a way that no kernel follows."""
    if hasattr(router, _SCALES[1]):  # as only one family names it: proved
        return Routing(sigmoid=True, normalised=True)
    found = _choosing_of(router)
    return found._replace(least=_least(router)) if found.sigmoid and found.normalised else found


def scale_of(router: Any) -> float:
    """Return what multiplies all shares."""
    return next((float(getattr(router, name)) for name in _SCALES if hasattr(router, name)), 1.0)


def _choosing_of(router: Any) -> Routing:
    """Return all but `least`. A router that knows no groups is told by its attributes, and proved."""
    if not hasattr(router, "num_group"):
        return Routing(hasattr(router, "routed_scaling_factor"), bool(getattr(router, "norm_topk_prob", True)))
    groups, top_groups = int(router.num_group or 1), int(router.topk_group or 1)
    generator = torch.Generator().manual_seed(0)
    (count, hidden), corrected = router.weight.shape, hasattr(router, CORRECTION)
    x, weight = (torch.randn(rows, hidden, generator=generator) for rows in (_ROWS, count))
    bias = torch.randn(count, generator=generator) / 4 if corrected else torch.zeros(count)
    parameters = {"weight": weight / hidden**0.5} | ({CORRECTION: bias} if corrected else {})
    logits, shares, chosen = functional_call(router, parameters, (x,))
    found = torch.zeros(_ROWS, count).scatter(1, chosen, shares.float())
    grouped = [(groups, top_groups, 1), (groups, top_groups, 2)] if 1 < groups <= _MOST_GROUPS else []
    for sigmoid, normalised, of_groups in product((True, False), (True, False), [(1, 1, 1), *grouped]):
        if not sigmoid and (corrected or of_groups[2] == 2):
            continue  # kernels rank by the logits, which have other sums than their softmax
        routing = Routing(sigmoid, normalised, *of_groups)
        expected = float(router.routed_scaling_factor) * _shares(logits.float(), bias, chosen.shape[1], routing)
        enough = chosen.shape[1] <= of_groups[1] * (count // of_groups[0])
        if enough and torch.allclose(found, expected, rtol=1e-4, atol=1e-6):
            return routing
    raise OtherStructure(f"{type(router).__name__}, which chooses experts in a way of its own")


def _least(router: Any) -> float:
    """Return what a router adds to the sum of sigmoids that it divides by: it shows where all of them are tiny."""
    x, weight = torch.ones(1, router.weight.shape[1]), torch.full(router.weight.shape, _TINY / router.weight.shape[1])
    given = {name: torch.zeros(part.shape) for name, part in router.named_parameters() if name != "weight"}
    given |= {name: torch.zeros(part.shape) for name, part in router.named_buffers()}
    bias = [torch.zeros(len(weight))] if getattr(router, "use_expert_bias", False) else []
    logits, shares, chosen = functional_call(router, given | {"weight": weight}, (x, *bias))
    sums = float(logits.double().sigmoid()[0, 0]) * chosen.shape[1]
    added = sums * (float(router.routed_scaling_factor) / float(shares.double().sum()) - 1)
    return float(f"{added:.1g}") if added > sums / 1e4 else Routing._field_defaults["least"]


def _shares(logits: Tensor, bias: Tensor, top_k: int, routing: Routing) -> Tensor:
    """Return [rows, experts]: what each counts, 0 if it is not chosen."""
    scores = logits.sigmoid() if routing.sigmoid else logits.softmax(-1)
    ranked = scores + bias
    if routing.groups > 1:
        best = ranked.unflatten(1, (routing.groups, -1)).topk(routing.counted, -1).values.sum(-1)
        kept = torch.zeros_like(best).scatter(1, best.topk(routing.top_groups, -1).indices, 1)
        ranked = ranked.where(kept.repeat_interleave(logits.shape[1] // routing.groups, 1) > 0, -torch.inf)
    chosen = ranked.topk(top_k, -1).indices
    shares = scores.gather(1, chosen)
    shares = shares / shares.sum(1, keepdim=True) if routing.normalised else shares
    return torch.zeros_like(scores).scatter(1, chosen, shares)
