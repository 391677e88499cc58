"""What transformers decides of a tokenizer is kept in the cache's directories, until a file changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine.text.tokenizer import Tokenizer
from engine.weights import tokenizer as loading
from engine.weights.gguf.source import SOURCE
from engine.weights.tokenizer import KEPT, load_tokenizer
from tests.conftest import TEMPLATE, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory of the cache."""
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / SOURCE).write_text("{}", encoding="utf8")
    return tmp_path


@pytest.fixture
def transformers_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What transformers has read."""
    read: list[str] = []
    usual = AutoTokenizer.from_pretrained

    def noted(name: str, **options: Any) -> Any:
        read.append(name)
        return usual(name, **options)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", noted)
    return read


def test_a_later_start_reads_what_is_kept(folder: Path, transformers_reads: list[str]) -> None:
    first, later = load_tokenizer(str(folder)), load_tokenizer(str(folder))
    assert transformers_reads == [str(folder)]
    assert isinstance(later, Tokenizer) and later.get_vocab() == first.get_vocab()
    assert later.chat_template == first.chat_template == TEMPLATE


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "added.json"])
def test_a_file_that_changes_is_read_again(folder: Path, transformers_reads: list[str], name: str) -> None:
    load_tokenizer(str(folder))
    file = folder / name
    file.write_text((file.read_text("utf8") if file.exists() else "{}") + "\n", "utf8")
    load_tokenizer(str(folder))
    assert len(transformers_reads) == 2
    load_tokenizer(str(folder))
    assert len(transformers_reads) == 2


def test_another_version_of_transformers_reads_again(
    folder: Path, transformers_reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_tokenizer(str(folder))
    monkeypatch.setattr(loading, "version", lambda name: f"{name} 99")
    load_tokenizer(str(folder))
    assert len(transformers_reads) == 2


@pytest.mark.parametrize("damage", [b"", b"nothing of ours", None])
def test_a_damaged_file_is_made_anew(folder: Path, transformers_reads: list[str], damage: bytes | None) -> None:
    load_tokenizer(str(folder))
    kept = folder / KEPT
    kept.write_bytes(kept.read_bytes()[:-9] + b"123456789" if damage is None else damage)
    assert load_tokenizer(str(folder)).chat_template == TEMPLATE
    load_tokenizer(str(folder))
    assert len(transformers_reads) == 2


def test_nothing_is_written_to_a_checkpoint(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert isinstance(load_tokenizer(str(tmp_path)), Tokenizer)
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_cannot_be_written_is_read_each_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loading, "write_checked", full)
    assert load_tokenizer(str(folder)).chat_template == TEMPLATE
    assert not (folder / KEPT).exists()
