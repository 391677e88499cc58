from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.server.http.owner_names import OwnerNames


def test_names_stay_the_same_with_a_cache_alone(tmp_path: Path) -> None:
    kept = {OwnerNames(str(tmp_path / "cache")).name(b"key", "session") for _ in range(2)}
    new = {OwnerNames(None).name(b"key", "session") for _ in range(2)}
    assert len(kept) == 1 and len(new) == 2


def test_sessions_of_a_key_share_what_stands_before_the_slash() -> None:
    names = OwnerNames(None)
    tenants = [str(names.name(key, session)).partition("/")[0] for key in (b"a", b"b", b"") for session in ("s", "t")]
    assert tenants[0] == tenants[1] != tenants[2] == tenants[3] and tenants[4:] == ["", ""]


def test_of_servers_that_start_at_once_all_use_the_same_secret(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        names = {made.name(b"key", "") for made in pool.map(OwnerNames, [str(tmp_path)] * 16)}
    assert len(names) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["owners.key"]


def test_only_its_owner_may_read_the_secret(tmp_path: Path) -> None:
    OwnerNames(str(tmp_path / "cache"))
    assert stat.S_IMODE((tmp_path / "cache" / "owners.key").stat().st_mode) == 0o600


def test_a_damaged_secret_is_told_of_and_made_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = OwnerNames(str(tmp_path)).name(b"key", "")
    (tmp_path / "owners.key").write_bytes(b"cut")
    after = OwnerNames(str(tmp_path)).name(b"key", "")
    assert "damaged" in capsys.readouterr().err
    assert before != after == OwnerNames(str(tmp_path)).name(b"key", "")


def test_without_a_folder_that_can_be_written_names_are_new_and_the_server_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert OwnerNames(str(tmp_path / "file")).name(b"key", "")
    assert len(capsys.readouterr().err.splitlines()) == 1
