from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config import ROOT, Config, DrafterConfig, load, parse_assignment
from engine.core.errors import ConfigError
from engine.core.methods import METHODS
from engine.placement import oversubscription, share_cores


def test_an_override_reaches_into_a_section_and_leaves_the_rest() -> None:
    values: dict[str, Any] = {"model": "m", "drafter": {"length": 7}}
    for given in (values, Config(model="m", drafter=DrafterConfig(length=7))):
        config = load(given, {"drafter.budget": 40, "method": "pld"})
        assert (config.drafter.budget, config.drafter.length, config.method) == (40, 7, "pld")
    assert values == {"model": "m", "drafter": {"length": 7}}


def test_paths_with_a_dot_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model: ./m\ndrafter: {path: ../d}\n")
    config = load(tmp_path / "a.yaml")
    assert (config.model, config.drafter.path) == (str(tmp_path / "m"), str(tmp_path.parent / "d"))


def test_a_tilde_before_a_path_is_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    (tmp_path / "a.yaml").write_text("model: ~/model\nverifier: {cache: ~/cache}\n")
    keys = [f"drafter.{key}" for key in ("path", "datastore", "answers", "tuned", "learned")]
    keys += ["tcp.keys", "trace", "chat_template"]
    given = dict(parse_assignment(f"{key}=~/{key.rpartition('.')[2]}") for key in keys)
    config = load(tmp_path / "a.yaml", given).model_dump()
    for key in (*keys, "model", "verifier.cache"):
        section, _, name = key.rpartition(".")
        assert (config[section] if section else config)[name] == f"/home/ann/{name}"


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


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- a\n- b\n", r"bad\.yaml"),
        ("a: [", r"bad\.yaml"),
        ("just words", r"bad\.yaml"),
        ("method: pld\n  bad: [", r"bad\.yaml: is not YAML: line 2: mapping values are not allowed here"),
        (None, r"bad\.yaml: cannot be read"),
    ],
)
def test_a_file_that_holds_no_configuration_is_named(tmp_path: Path, text: str | None, told: str) -> None:
    if text is not None:
        (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match=told):
        load(tmp_path / "bad.yaml")
    with pytest.raises(ConfigError, match="config=None: give a file"):
        load(None)  # type: ignore[arg-type]


def test_a_section_whose_keys_are_all_comments_is_empty(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("drafter:\n  # budget: 9\nqueue:\n")
    assert load(tmp_path / "a.yaml", {"drafter.shared_noise": False}) == load({"drafter": {"shared_noise": False}})


def test_a_configuration_that_ships_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load("configs/demo.yaml") == load(ROOT / "configs" / "demo.yaml")


def test_assignments_are_read_as_yaml() -> None:
    assert parse_assignment("drafter.branches=[3, 2]") == ("drafter.branches", [3, 2])
    for wrong, told in (("drafter.budget", "KEY=VALUE"), ("=40", "KEY=VALUE"), ("drafter.branches=[3", "not YAML")):
        with pytest.raises(ConfigError, match=told):
            parse_assignment(wrong)


@pytest.mark.parametrize(
    ("changes", "gpu", "shares"),
    [
        ({}, False, (8, 4, 4)),
        ({"method": "suffix"}, False, (8, 8, 1)),
        ({"drafter.threads": 2}, False, (8, 6, 2)),
        ({"verifier.threads": 3}, False, (3, 3, 4)),
        ({"mode": "sequential"}, False, (8, 8, 8)),
        ({"mode": "sequential", "verifier.threads": 3}, False, (3, 3, 3)),
        ({}, True, (1, 1, 1)),
        ({"verifier.threads": 3, "drafter.threads": 2}, True, (3, 3, 2)),
    ],
)
def test_a_draft_model_of_its_own_worker_gets_half_of_the_cores_and_beside_a_gpu_each_has_one(
    changes: dict[str, Any], gpu: bool, shares: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.placement.cores", lambda: 8)
    assert share_cores(load({"model": "m"}, {"method": "eagle3", "mode": "async"} | changes), gpu=gpu) == shares


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
