"""The directory of a quantised checkpoint: made once for each state of the checkpoint, and never half."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from drafters.heads.checkpoint import TargetWeights
from engine.cli.models import app
from engine.config import load
from engine.core.errors import ConfigError, ModelError
from engine.weights.cache import MANIFEST, home
from engine.weights.gguf.source import SOURCE
from engine.weights.quantised import quantised_folder, quantised_source_of, unquantised
from engine.weights.quantised_weights import open_quantised
from engine.weights.resolve import resolved, target_folder
from tests.conftest import save_tiny_llama
from tests.engine.weights.tiny_gguf import write_gguf


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(save_tiny_llama(tmp_path / "tiny-llama", hidden_size=64))


def kept() -> list[str]:
    return sorted(path.name for path in home().rglob("*") if path.is_file() and not path.name.endswith(".lock"))


def test_the_directory_has_all_but_the_weights(checkpoint: Path) -> None:
    folder = Path(quantised_folder(str(checkpoint), "q8_0"))
    assert folder.name.startswith("tiny-llama-q8_0-")
    copied = {file.name for file in checkpoint.iterdir()} - {"model.safetensors"}
    assert {file.name for file in folder.iterdir()} == copied | {SOURCE, MANIFEST}
    config = json.loads((folder / "config.json").read_text())
    assert config == json.loads((checkpoint / "config.json").read_text()) | {"dtype": "bfloat16"}
    assert unquantised(folder) == checkpoint and unquantised(checkpoint) == checkpoint


def test_the_directory_of_a_hub_id_has_the_name_of_the_model(checkpoint: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--some--llama" / "snapshots" / "0123"
    shutil.copytree(checkpoint, snapshot)
    assert Path(quantised_folder(str(snapshot), "q4_0")).name.startswith("some--llama-q4_0-")


def test_it_is_made_once_for_each_type(checkpoint: Path) -> None:
    folders = {quantised_folder(str(checkpoint), weights) for weights in ("q8_0", "q4_1", "q8_0")}
    assert len(folders) == 2 == len(list((home() / "quantised").glob("[!.]*")))


def test_a_configuration_that_is_resolved_stays_so(checkpoint: Path) -> None:
    once = resolved(load({"model": str(checkpoint), "weights": "q8_0"}))
    assert once.model != str(checkpoint) and resolved(once) == once


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer_config.json"])
def test_a_checkpoint_that_has_changed_is_another_model(checkpoint: Path, name: str) -> None:
    before = Path(quantised_folder(str(checkpoint), "q8_0"))
    (checkpoint / name).write_bytes((checkpoint / name).read_bytes())
    assert quantised_folder(str(checkpoint), "q8_0") != str(before)
    with pytest.raises(ModelError, match=r"its checkpoint has changed; name the checkpoint itself: .* weights=q8_0$"):
        open_quantised(before)


def test_a_checkpoint_that_is_gone_is_one_line(checkpoint: Path) -> None:
    folder = Path(quantised_folder(str(checkpoint), "q8_0"))
    shutil.rmtree(checkpoint)
    with pytest.raises(ModelError, match=r"its checkpoint .*tiny-llama is gone; put it back, or name another model$"):
        open_quantised(folder)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"checkpoint": 3}'])
def test_a_damaged_directory_is_made_anew_with_a_line(
    checkpoint: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(quantised_folder(str(checkpoint), "q8_0"))
    (folder / SOURCE).write_text(content)
    (folder / "config.json").unlink()
    assert capsys.readouterr().err == ""
    assert quantised_folder(str(checkpoint), "q8_0") == str(folder)
    assert capsys.readouterr().err == f"talon: {folder} is damaged, or of another version, and is made anew\n"
    assert open_quantised(folder) is not None and (folder / "config.json").is_file()


def test_what_an_earlier_format_made_is_listed_as_such_and_not_taken(checkpoint: Path) -> None:
    folder = Path(quantised_folder(str(checkpoint), "q8_0"))
    listed = CliRunner().invoke(app, ["list"]).output
    assert f"{folder.name}  0 MB in {folder}\n" in listed
    source = json.loads((folder / SOURCE).read_text())
    (folder / SOURCE).write_text(json.dumps(source | {"format": 0}))
    assert quantised_source_of(folder) is None
    assert f"{folder.name}  0 MB in {folder}; of an earlier version" in CliRunner().invoke(app, ["list"]).output


def test_it_can_be_removed_and_the_checkpoint_stays(checkpoint: Path) -> None:
    folder = Path(quantised_folder(str(checkpoint), "q8_0"))
    assert CliRunner().invoke(app, ["remove", folder.name]).output == f"removed {folder}\n"
    assert not folder.exists() and (checkpoint / "model.safetensors").is_file()


def test_engines_that_start_at_once_share_it(checkpoint: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: quantised_folder(str(checkpoint), "q8_0"), range(8)))
    assert len(found) == 1 and open_quantised(Path(found.pop())) is not None


def test_weights_that_are_quantised_already_are_refused(checkpoint: Path, tmp_path: Path, describes_here: None) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    made, file = quantised_folder(str(checkpoint), "q8_0"), checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "gptq"}}))
    for model in (made, str(tmp_path / "tiny.gguf"), str(checkpoint)):
        with pytest.raises(ConfigError, match=r"^weights=q4_0: the weights of .* are quantised already; leave weights"):
            target_folder(load({"model": model, "weights": "q4_0"}))
    assert not [*(home() / "quantised").glob("*q4_0*")]


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("config.json", "", r"^model=.*: no usable config\.json"),
        ("config.json", "[]", r"^model=.*: no usable config\.json"),
        ("config.json", '{"text_config": 3}', r"^model=.*: no usable config\.json"),
        ("model.safetensors", "1234", "damaged or cut short"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_one_line_and_leaves_nothing_behind(
    checkpoint: Path, file: str, content: str, told: str
) -> None:
    (checkpoint / file).write_text(content)
    with pytest.raises(ModelError, match=told):
        quantised_folder(str(checkpoint), "q8_0")
    assert kept() == []


def test_an_unknown_type_is_told_those_that_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"weights": "q4_k"})
    assert str(caught.value).startswith("weights='q4_k': ") and "'q8_0', 'q5_1', 'q5_0', 'q4_1' or 'q4_0'" in str(
        caught.value
    )


def test_what_is_no_directory_is_left_to_whoever_loads_it() -> None:
    assert quantised_folder("some/hub-id", "q8_0") == "some/hub-id"


def test_draft_heads_borrow_the_checkpoints_own_embedding(checkpoint: Path) -> None:
    folder = quantised_folder(str(checkpoint), "q4_0")
    assert (TargetWeights.read(folder).embedding == TargetWeights.read(str(checkpoint)).embedding).all()
