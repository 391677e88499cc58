"""Heads as the configuration names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafters.heads.growth.policies import MEDUSA_63, Adaptive, Dynamic, Static
from drafters.heads.head_drafter import HeadDrafter
from drafters.registry import build, build_for_worker
from engine.config import load
from engine.core.errors import ConfigError
from engine.core.methods import source_of
from tests.drafters.conftest import write_checkpoint
from tests.drafters.heads.test_medusa import COUNT, MEDUSA


def drafter(target_dir: Path, path: Path, budget: int = 40, **growth: object) -> HeadDrafter:
    config = {"medusa_num_heads": COUNT, "medusa_num_layers": 1}
    where = write_checkpoint(path, "medusa_lm_head.pt", config, MEDUSA)
    options = {"path": where, "budget": budget, "growth": growth}
    values = {"model": str(target_dir), "method": "medusa", "drafter": options}
    built = build(load(values))
    assert isinstance(built, HeadDrafter)
    return built


def test_the_configuration_chooses_head_and_growth(target_dir: Path, tmp_path: Path) -> None:
    adaptive = drafter(target_dir, tmp_path, mu=0.1).policy
    assert isinstance(adaptive, Adaptive) and (adaptive.budget, adaptive.mu) == (40, 0.1)
    dynamic = drafter(target_dir, tmp_path, policy="dynamic", depth=3).policy
    assert isinstance(dynamic, Dynamic) and (dynamic.budget, dynamic.depth) == (40, 3)
    published = drafter(target_dir, tmp_path, policy="published", budget=64).policy
    assert isinstance(published, Static) and len(published.paths) == len(MEDUSA_63)


def test_a_growth_whose_trees_would_all_be_refused_is_refused_itself(target_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"drafter\.budget=63: .*published have 64 nodes: set drafter\.budget=64"):
        drafter(target_dir, tmp_path, policy="published", budget=63)


def test_a_head_learns_its_chances_only_where_trees_are_cut_by_them(target_dir: Path, tmp_path: Path) -> None:
    where = write_checkpoint(tmp_path, "medusa_lm_head.pt", {"medusa_num_heads": COUNT, "medusa_num_layers": 1}, MEDUSA)
    config = load({"model": str(target_dir), "method": "medusa", "drafter": {"path": where}})
    served = build_for_worker(config)
    assert served.calibrated and served.rests and served.source == source_of("medusa")
    published = build_for_worker(load(config, {"verifier.cut": False}))
    assert not published.calibrated and published.source == source_of("medusa")
