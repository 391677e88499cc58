"""Everything in the cache may be removed or damaged in any way: the next start makes it anew."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from engine.config import load
from engine.core.errors import ModelError
from engine.files.digest import sha256_of
from engine.model.loading import load_config, open_stored
from engine.weights import cache
from engine.weights import resolve as resolving
from engine.weights.cache import MANIFEST, home, is_intact, lock_of
from engine.weights.catalogue import CATALOGUE, KnownModel
from engine.weights.gguf import source
from engine.weights.identity import model_identity
from engine.weights.resolve import resolve, resolved, restore
from engine.weights.tokenizer import load_tokenizer
from tests.engine.files.rights import ordinary_user
from tests.engine.weights.tiny_gguf import change_last_byte, write_gguf

DESCRIPTION = (
    *("README.md", "chat_template.jinja", "config.json", "generation_config.json", MANIFEST, source.SEEN),
    *("source.json", "tokenizer.json", "tokenizer.msgpack", "tokenizer_config.json", "tiny.gguf"),
)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def another(file: Path) -> None:
    file.write_bytes(bytes(byte ^ 0x55 for byte in file.read_bytes()))


def a_directory(file: Path) -> None:
    file.unlink()
    (file / "within").mkdir(parents=True)


def a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def a_loop(file: Path) -> None:
    file.unlink()
    file.symlink_to(file)


def endless(file: Path) -> None:
    """A length that no memory holds; the disk holds none of it."""
    os.truncate(file, 1 << 42)


def another_version(file: Path) -> None:
    content = json.loads(file.read_bytes()) if file.suffix == ".json" else {}
    file.write_text(json.dumps({**content, "format": 0, "model_type": "other", "version": 9}))


DAMAGE: list[Callable[[Path], None]] = [
    *(Path.unlink, cut, lambda file: os.truncate(file, 0), another, a_directory, a_pipe, a_loop, endless),
    *(another_version, lambda file: file.chmod(0)),
]
OF_A_KIND = {"config.json", MANIFEST, source.SEEN, "source.json", "tokenizer.msgpack", "tiny.gguf"}
"""Files that are checked in different ways; the others are in the manifest as config.json is."""
IDS = ["gone", "cut", "empty", "other bytes", "directory", "pipe", "loop", "endless", "another version", "no rights"]


@pytest.fixture
def open_home(monkeypatch: pytest.MonkeyPatch, describes_here: None) -> Iterator[Path]:
    """Give an empty cache of an ordinary user, whose tiny model is in the catalogue."""

    def download(model: KnownModel, folder: Path, report: object) -> Path:
        write_gguf(folder / "tiny.gguf", kind=Kind.Q8_0)
        return folder / "tiny.gguf"

    monkeypatch.setattr(resolving, "download", download)
    with ordinary_user() as folder:
        write_gguf(folder / "tiny.gguf", kind=Kind.Q8_0)
        content = (folder / "tiny.gguf").stat().st_size
        digest = resolving.sha256_of(folder / "tiny.gguf")
        monkeypatch.setitem(
            CATALOGUE, "tiny", KnownModel("tiny", "Tiny.", "tiny", "1", "tiny.gguf", digest, content, 0)
        )
        monkeypatch.setenv("TALON_HOME", str(folder / "home"))
        yield folder


def is_usable(folder: Path) -> bool:
    """Whether workers find in a directory what they read there."""
    opened = open_stored(folder)
    same = load_tokenizer(str(folder)).encode("a 48") and load_config(str(folder)).model_type == "llama"
    return opened is not None and bool(same)


@pytest.mark.parametrize("damage", DAMAGE, ids=IDS)
def test_each_file_of_a_description_may_be_damaged(open_home: Path, damage: Callable[[Path], None]) -> None:
    folder = Path(resolve("tiny"))
    resolve("tiny")
    assert {file.name for file in folder.iterdir()} == set(DESCRIPTION)
    for name in DESCRIPTION if damage is another else sorted(OF_A_KIND):
        assert (folder / name).exists(), name
        damage(folder / name)
        assert resolve("tiny") == str(folder) and is_usable(folder), name
        resolve("tiny")
    assert is_intact(folder)


def test_what_was_left_in_the_way_of_a_description_is_removed(open_home: Path) -> None:
    folder = home() / "gguf" / "tiny"
    home().mkdir()
    (home() / "gguf").write_bytes(b"in the way")
    assert is_usable(Path(resolve("tiny")))
    shutil.rmtree(folder)
    folder.write_bytes(b"in the way")
    lock_of(folder).unlink()
    lock_of(folder).mkdir()
    folder.with_name(".tiny.1.partial").write_bytes(b"in the way")
    assert is_usable(Path(resolve("tiny")))
    assert sorted(path.name for path in (home() / "gguf").iterdir()) == [".tiny.lock", "tiny"]


def test_the_weights_are_downloaded_again_only_if_they_are_not_those_expected(
    open_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(resolve("tiny"))
    (folder / "source.json").unlink()
    assert "made anew" not in capsys.readouterr().err
    with monkeypatch.context() as patched:
        patched.setattr(resolving, "download", lambda *_: pytest.fail("downloaded again"))
        resolve("tiny")
    assert f"talon: {folder} is damaged, or of another version, and is made anew\n" in capsys.readouterr().err
    change_last_byte(folder / "tiny.gguf")
    resolve("tiny")
    assert resolving.sha256_of(folder / "tiny.gguf") == CATALOGUE["tiny"].sha256


@pytest.mark.parametrize("copy", [shutil.copyfile, shutil.copy2], ids=["cp -r", "cp -a"])
def test_a_cache_folder_that_was_copied_is_used_as_it_is(
    open_home: Path, monkeypatch: pytest.MonkeyPatch, copy: Callable[..., object]
) -> None:
    first = Path(resolve("tiny"))
    shutil.copytree(home(), open_home / "copy", copy_function=copy)
    monkeypatch.setenv("TALON_HOME", str(open_home / "copy"))
    for name in ("describe", "download"):
        monkeypatch.setattr(resolving, name, lambda *_: pytest.fail("made anew"))
    second = Path(resolve("tiny"))
    assert second == open_home / "copy" / "gguf" / "tiny" and is_usable(second)
    assert model_identity(str(second)) == model_identity(str(first)), "its cached prompts are found again"


def test_a_description_of_a_users_file_is_made_anew_too(open_home: Path) -> None:
    folder = Path(resolve(str(open_home / "tiny.gguf")))
    for name in ("source.json", "config.json", source.SEEN):
        cut(folder / name)
        assert resolve(str(open_home / "tiny.gguf")) == str(folder) and is_usable(folder)


def test_a_start_and_a_restart_read_each_file_of_a_description_once(
    open_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(cache, "sha256_of", lambda file: (read.append(file.name), sha256_of(file))[1])
    for model in ("tiny", str(open_home / "tiny.gguf")):
        given = load({"model": model})
        config = resolved(given)
        read.clear()
        resolve(model)
        assert len(read) == len(set(read)) > 3
        read.clear()
        assert not restore(given, config)
        assert len(read) == len(set(read)) > 3


def test_a_worker_that_is_replaced_finds_the_model_whatever_was_removed_meanwhile(
    open_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(open_home / "tiny.gguf")
    given = load({"model": "tiny", "method": "sps", "drafter": {"path": file}})
    config = resolved(given)
    shutil.rmtree(home())
    assert restore(given, config)
    assert not restore(given, config), "nothing is damaged any more"
    assert is_usable(Path(config.model)) and is_usable(Path(str(config.drafter.path)))
    (open_home / "tiny.gguf").unlink()
    shutil.rmtree(home())
    capsys.readouterr()
    assert restore(given, config)
    assert is_usable(Path(config.model))
    assert f"talon: drafter.path={file}: " in capsys.readouterr().err
    with pytest.raises(ModelError):
        resolve(file)
    assert not restore(given, config), "what is left cannot be made"
