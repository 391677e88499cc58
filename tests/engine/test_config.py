from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config import ROOT, Config, DrafterConfig, load, parse_assignment
from engine.core.errors import ConfigError
from engine.core.methods import METHODS
from engine.placement import oversubscription, share_cores


def test_an_override_reaches_into_a_section_and_leaves_the_rest() -> None:
    config = load({"model": "m", "drafter": {"length": 7}}, {"drafter.budget": 40, "method": "pld"})
    assert (config.drafter.budget, config.drafter.length, config.method) == (40, 7, "pld")


def test_a_config_object_can_be_overridden() -> None:
    assert load(Config(model="m", drafter=DrafterConfig(length=3)), {"drafter.budget": 9}).drafter.length == 3


def test_overriding_leaves_the_callers_dictionary_alone() -> None:
    values: dict[str, Any] = {"model": "m", "drafter": {"length": 7}}
    load(values, {"drafter.budget": 40})
    assert values == {"model": "m", "drafter": {"length": 7}}


def test_paths_with_a_dot_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model: ./m\ndrafter: {path: ../d}\n")
    config = load(tmp_path / "a.yaml")
    assert (config.model, config.drafter.path) == (str(tmp_path / "m"), str(tmp_path.parent / "d"))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"methd": "pld"}, "methd: unknown configuration key; did you mean method?"),
        ({"drafter": {"budgt": 3}}, "drafter.budgt: unknown configuration key; did you mean drafter.budget?"),
        ({"queue": {"zzz": 3}}, "queue.zzz: unknown configuration key; known: size, full"),
        ({"dtype": "int8"}, "dtype='int8': "),
        ({"drafter": {"budget": "many"}}, "drafter.budget='many': "),
        ({"drafter": {"budget": 0}}, "drafter.budget=0: "),
        ({"verifier": 3}, "verifier=3: "),
        ({"queue": {"full": "explode"}}, "queue.full='explode': "),
        ({"verifier": {"draft_timeout_s": float("inf")}}, "verifier.draft_timeout_s=inf: "),
        ({"verifier": {"draft_timeout_s": 1e300}}, "verifier.draft_timeout_s=1e+300: "),
        ({"verifier": {"simulated_latency_ms": float("nan")}}, "verifier.simulated_latency_ms=nan: "),
        ({"heartbeat_timeout_s": 0.4}, "heartbeat_timeout_s=0.4: "),
        ({"heartbeat_timeout_s": float("inf")}, "heartbeat_timeout_s=inf: "),
        ({"tcp": {"endpoint": "tcp://127.0.0.1:0"}}, "tcp.endpoint='tcp://127.0.0.1:0': "),
        ({"start_timeout_s": 0.001}, "start_timeout_s=0.001: "),
    ],
)
def test_a_wrong_key_or_value_is_told_in_one_line(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        load({"model": "m"} | values)
    assert str(error.value).startswith(told)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "just words"])
def test_a_file_that_holds_no_configuration_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        load(tmp_path / "bad.yaml")


def test_where_a_file_is_no_yaml_is_told(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("method: pld\n  bad: [")
    with pytest.raises(ConfigError, match=r"bad\.yaml: is not YAML: line 2: mapping values are not allowed here"):
        load(tmp_path / "bad.yaml")


def test_a_section_whose_keys_are_all_comments_is_empty(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("drafter:\n  # budget: 9\nqueue:\n")
    assert load(tmp_path / "a.yaml", {"drafter.shared_noise": False}) == load({"drafter": {"shared_noise": False}})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read"):
        load(tmp_path / "none.yaml")


def test_a_configuration_that_ships_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load("configs/demo.yaml") == load(ROOT / "configs" / "demo.yaml")


def test_what_is_no_configuration_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="config=None: give a file"):
        load(None)  # type: ignore[arg-type]


def test_assignments_are_read_as_yaml() -> None:
    assert parse_assignment("drafter.branches=[3, 2]") == ("drafter.branches", [3, 2])
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        parse_assignment("drafter.budget")
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        parse_assignment("=40")
    with pytest.raises(ConfigError, match="not YAML"):
        parse_assignment("drafter.branches=[3")


def test_a_draft_model_of_its_own_worker_gets_half_of_the_cores_and_a_table_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.placement.cores", lambda: 8)
    ahead = Config(model="m", mode="async", method="eagle3")
    assert share_cores(ahead) == (8, 4, 4)
    assert share_cores(load(ahead, {"method": "suffix"})) == (8, 8, 1)
    assert share_cores(load(ahead, {"drafter.threads": 2})) == (8, 6, 2)
    assert share_cores(load(ahead, {"verifier.threads": 3})) == (3, 3, 4)


def test_in_turns_each_has_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.placement.cores", lambda: 8)
    turns = Config(model="m", mode="sequential", method="eagle3")
    assert share_cores(turns) == (8, 8, 8)
    assert share_cores(load(turns, {"verifier.threads": 3})) == (3, 3, 3)


def test_beside_a_gpu_each_has_one_unless_more_are_asked_for() -> None:
    ahead = Config(model="m", mode="async", method="eagle3")
    assert share_cores(ahead, gpu=True) == (1, 1, 1)
    assert share_cores(load(ahead, {"verifier.threads": 3, "drafter.threads": 2}), gpu=True) == (3, 3, 2)


def test_more_threads_than_cores_are_refused_with_what_they_would_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.placement.cores", lambda: 2)
    greedy = load({"model": "m"}, {"method": "eagle3", "mode": "async", "verifier.threads": 2})
    assert share_cores(greedy) == (2, 1, 1)
    assert "verifier.threads=2: 1 used" in (oversubscription(greedy) or "")
    assert oversubscription(load(greedy, {"mode": "sequential"})) is None
    assert oversubscription(Config(model="m")) is None
    in_turns = load(greedy, {"mode": "sequential", "drafter.threads": 1})
    assert (oversubscription(in_turns) or "").startswith("drafter.threads=1: 2 used, those of the verifier")


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("[!s]*.yaml")), ids=lambda file: file.stem)
def test_every_configuration_that_ships_is_valid(file: Path) -> None:
    config = load(file)
    assert config.method in METHODS


def test_the_methods_name_can_stand_in_the_path_of_its_weights() -> None:
    config = load({"model": "m"}, {"drafter.path": "heads/{method}"})
    assert config.drafter.weights("eagle") == "heads/eagle"
    assert Config(model="m").drafter.weights("eagle") is None
