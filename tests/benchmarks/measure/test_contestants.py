from __future__ import annotations

from benchmarks.measure.contestants import without_effect


def test_keys_that_contestants_define_otherwise_are_named() -> None:
    given = {"model": "tiny", "verifier.cut": True, "drafter.growth.policy": "adaptive"}
    assert without_effect(["none", "pld", "eagle3", "talon-suffix", "hf"], given, as_served=False) == [
        "--set verifier.cut=True does not apply to pld, eagle3: their definition has its own",
        "--set drafter.growth.policy=adaptive does not apply to eagle3: their definition has its own",
    ]


def test_a_method_as_served_takes_every_key() -> None:
    given = {"verifier.cut": False, "drafter.growth.policy": "adaptive"}
    assert without_effect(["none", "pld", "eagle3"], given, as_served=True) == []
