"""Paths of heads, draft models and indexes, refused before any model loads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from drafters.requirements import check, check_paths
from engine import Engine
from engine.config import DEMO, ROOT, load
from engine.errors import ModelError, TalonError
from engine.launch import Workers
from engine.worker import WorkerSpec


@pytest.fixture
def broken(tmp_path: Path, tiny: str, tiny_draft: str) -> Path:
    """A folder of things that are not what they should be."""
    (tmp_path / "empty").mkdir()
    shutil.copytree(tiny, tmp_path / "no_weights")
    (tmp_path / "no_weights" / "model.safetensors").unlink()
    shutil.copytree(Path(tiny_draft) / "datastore", tmp_path / "cut")
    shard = next((tmp_path / "cut").glob("*.suffixes"))
    shard.write_bytes(shard.read_bytes()[:-4])
    (tmp_path / "calibration.npz").write_text("no arrays")
    return tmp_path


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"method": "eagle3"}, "drafter.path: method eagle3 needs a head"),
    ({"method": "sps"}, "drafter.path: method sps needs the directory"),
    ({"method": "medusa", "drafter.path": "{broken}/nowhere"}, "drafter.path={broken}/nowhere: no such directory"),
    ({"method": "hybrid", "drafter.path": "{broken}/{method}"}, "drafter.path={broken}/eagle3: no such directory"),
    ({"method": "eagle", "drafter.path": "{broken}/empty"}, "drafter.path={broken}/empty: config.json cannot be read"),
    ({"method": "sps", "drafter.path": "{broken}/no_weights"}, "drafter.path={broken}/no_weights: holds no weights"),
    ({"method": "datastore"}, "drafter.datastore: method datastore needs"),
    ({"method": "datastore", "drafter.datastore": "{broken}/empty"}, "drafter.datastore={broken}/empty: not a datast"),
    ({"method": "datastore", "drafter.datastore": "{broken}/cut"}, "drafter.datastore={broken}/cut/0000.suffixes: mis"),
    ({"method": "suffix", "drafter.dense": "{broken}/cut"}, "drafter.dense={broken}/cut: header.json is not a dense"),
    ({"method": "pld", "drafter.calibration": "{broken}/calibration.npz"}, "drafter.calibration={broken}/calibration"),
    ({"method": "pld", "drafter.calibration": "/proc/c.npz"}, "drafter.calibration=/proc/c.npz: cannot be written"),
    ({"method": "pld", "transport": "tcp", "tcp.keys": "{broken}/empty"}, "tcp.keys={broken}/empty: verifier.key_sec"),
]


@pytest.mark.parametrize(("overrides", "told"), WRONG, ids=[told.partition(":")[0] for _, told in WRONG])
async def test_what_the_drafter_cannot_open_is_told_before_any_worker_starts(
    tiny: str, broken: Path, monkeypatch: pytest.MonkeyPatch, overrides: dict[str, Any], told: str
) -> None:
    def start(workers: Workers, spec: WorkerSpec) -> Any:
        raise AssertionError(f"the {spec.role} was started")

    monkeypatch.setattr(Workers, "_begin", start)
    values = {key: value.replace("{broken}", str(broken)) for key, value in overrides.items()}
    with pytest.raises(TalonError) as error:
        await Engine.start({"model": tiny}, **values)
    assert str(error.value).startswith(told.replace("{broken}", str(broken)))
    assert "\n" not in str(error.value)


def test_a_drafter_elsewhere_has_its_paths_elsewhere(tiny: str) -> None:
    values = {"transport": "tcp", "tcp.insecure": True, "tcp.remote": True, "method": "eagle3", "drafter.path": "/gone"}
    workers = Workers(load({"model": tiny}, values), None)  # type: ignore[arg-type]
    try:
        workers.check()
    finally:
        workers.close()


@pytest.mark.parametrize("method", ["block", "eagle3", "hybrid"])
def test_the_heads_that_ship_pass(method: str, smollm2: str) -> None:
    check(load(ROOT / "configs" / "smollm2.yaml", {"model": smollm2, "method": method}))


def test_of_a_drafter_on_another_machine_no_path_is_looked_at(tiny: str) -> None:
    far = {"transport": "tcp", "tcp.remote": True, "tcp.insecure": True, "drafter.path": "/only/there", "model": tiny}
    check_paths(load(DEMO, far | {"method": "eagle3"}))
    with pytest.raises(ModelError, match=r"drafter\.path=/only/there: no such directory"):
        check_paths(load(DEMO, {"method": "eagle3", "drafter.path": "/only/there", "model": tiny}))


def test_a_path_that_the_method_does_not_read_may_be_missing(tiny: str) -> None:
    for method in ("none", "pld"):
        check_paths(load(DEMO, {"method": method, "drafter.path": "/nowhere", "model": tiny}))
