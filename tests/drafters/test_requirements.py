"""Paths of heads, draft models and indexes, refused before any model loads."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafters.registry import build
from drafters.requirements import check, check_paths
from engine import Engine, SamplingParams
from engine.config import DEMO, ROOT, Config, load
from engine.core.errors import ConfigError, ModelError, TalonError
from engine.frontend.processes import Workers
from engine.weights.resolve import resolved
from engine.weights.tokenizer import load_tokenizer
from engine.worker import WorkerSpec
from retrieval_index.datastore import Datastore


@pytest.fixture
def broken(tmp_path: Path, tiny: str, tiny_draft: str) -> Path:
    """A folder of things that are not what they should be."""
    (tmp_path / "empty").mkdir()
    shutil.copytree(tiny, tmp_path / "no_weights")
    (tmp_path / "no_weights" / "model.safetensors").unlink()
    shutil.copytree(Path(tiny_draft) / "datastore", tmp_path / "cut")
    shard = next((tmp_path / "cut").glob("*.suffixes"))
    shard.write_bytes(shard.read_bytes()[:-4])
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
    ({"method": "suffix", "drafter.answers": "{broken}/empty"}, "drafter.answers={broken}/empty: not a datastore"),
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


async def test_answers_of_another_vocabulary_are_refused(tiny: str, tiny_draft: str, tmp_path: Path) -> None:
    answers = tmp_path / "answers"
    shutil.copytree(Path(tiny_draft) / "datastore", answers)
    header = answers / "header.json"
    header.write_text(re.sub('"tokenizer":"[0-9a-f]+"', '"tokenizer":"0"', header.read_text()))
    with pytest.raises(ConfigError, match=r"drafter\.answers=.*: built with another tokenizer"):
        await Engine.start({"model": tiny}, **{"method": "suffix", "drafter.answers": str(answers)})
    async with await Engine.start({"model": tiny}, **{"method": "pld", "drafter.answers": str(answers)}):
        pass  # which does not read them


def test_a_model_known_by_name_brings_its_answers_unless_told_otherwise(
    smollm2: str, tiny: str, tiny_draft: str
) -> None:
    theirs = f"{tiny_draft}/datastore"
    ours = str(ROOT / "models" / "smollm2-135m" / "answers")
    for model, told, taken in [
        ("smollm2-135m", "auto", ours),
        ("smollm2-135m", None, None),
        ("smollm2-135m", theirs, theirs),
        (tiny, "auto", None),
    ]:
        assert resolved(load(DEMO, {"model": model, "drafter.answers": told})).drafter.answers == taken
    assert Datastore(Path(ours), load_tokenizer(smollm2)).tokens > 1_000_000


async def test_answers_change_no_text(tiny: str, tiny_draft: str) -> None:
    texts = []
    for answers in (None, f"{tiny_draft}/datastore"):
        options = {"model": tiny, "method": "suffix", "transport": "inproc", "drafter": {"answers": answers}}
        async with await Engine.start(options) as engine:
            assert engine.config.drafter.answers == answers
            ways = [SamplingParams(max_tokens=40, temperature=temperature) for temperature in (0.0, 1.0)]
            texts.append([(await engine.generate("the cat", way)).token_ids for way in ways])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("method", ["block", "eagle3", "hybrid"])
def test_the_heads_that_ship_pass(method: str, smollm2: str) -> None:
    check(load(ROOT / "configs" / "smollm2.yaml", {"model": smollm2, "method": method}))


def test_no_path_is_looked_at_of_a_drafter_on_another_machine_or_that_the_method_does_not_read(tiny: str) -> None:
    far = {"transport": "tcp", "tcp.remote": True, "tcp.insecure": True, "drafter.path": "/only/there", "model": tiny}
    check_paths(load(DEMO, far | {"method": "eagle3"}))
    with pytest.raises(ModelError, match=r"drafter\.path=/only/there: no such file or directory"):
        check_paths(load(DEMO, {"method": "eagle3", "drafter.path": "/only/there", "model": tiny}))
    for method in ("none", "pld"):
        check_paths(load(DEMO, {"method": method, "drafter.path": "/only/there", "model": tiny}))


@pytest.mark.parametrize("asked", [check, build])
def test_a_damaged_head_that_was_made_here_is_told_by_the_key_that_finds_it(
    asked: Callable[[Config], Any], tiny: str, tmp_path: Path
) -> None:
    head = tmp_path / "block"
    head.mkdir()
    if asked is build:
        shutil.copy(ROOT / "models/smollm2-135m/block/config.json", head)
        (head / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelError, match=f"^drafter.tuned={re.escape(str(head))}[:/]"):
        asked(load({"model": tiny, "method": "block"}, {"drafter.tuned": str(tmp_path), "drafter.path": None}))
