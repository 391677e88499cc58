"""Heads as the configuration names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafters.growth import MEDUSA_63, Adaptive, Dynamic, Static
from drafters.head_drafter import HeadDrafter
from drafters.registry import build
from engine.config import load
from engine.errors import ConfigError
from tests.drafters.conftest import write_checkpoint
from tests.drafters.test_medusa import COUNT, MEDUSA


def drafter(target_dir: Path, path: Path, **growth: object) -> HeadDrafter:
    config = {"medusa_num_heads": COUNT, "medusa_num_layers": 1}
    where = write_checkpoint(path, "medusa_lm_head.pt", config, MEDUSA)
    values = {"model": str(target_dir), "method": "medusa", "drafter": {"path": where, "budget": 40, "growth": growth}}
    built = build(load(values))
    assert isinstance(built, HeadDrafter)
    return built


def test_the_configuration_chooses_head_and_growth(target_dir: Path, tmp_path: Path) -> None:
    adaptive = drafter(target_dir, tmp_path, mu=0.1, gate="layer").policy
    assert isinstance(adaptive, Adaptive) and (adaptive.budget, adaptive.mu, adaptive.gate) == (40, 0.1, "layer")
    dynamic = drafter(target_dir, tmp_path, policy="dynamic", depth=3).policy
    assert isinstance(dynamic, Dynamic) and (dynamic.budget, dynamic.depth) == (40, 3)
    published = drafter(target_dir, tmp_path, policy="published").policy
    assert isinstance(published, Static) and len(published.paths) == len(MEDUSA_63)


def test_a_method_without_its_head_says_how_to_get_one(target_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"drafter\.path: method eagle3 needs a head.*talon train eagle3"):
        build(load({"model": str(target_dir), "method": "eagle3"}))
