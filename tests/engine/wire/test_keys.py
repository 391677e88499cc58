from __future__ import annotations

import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.cli.main import app
from engine.cli.remote import keys
from engine.core.errors import ConfigError
from engine.wire.keys import create, load


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_secrets_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    create(tmp_path / "a" / "keys")
    folder = tmp_path / "a" / "keys"
    assert mode(folder) == 0o700
    assert {path.name: mode(path) for path in folder.glob("*_secret")} == {
        "verifier.key_secret": 0o600,
        "drafter.key_secret": 0o600,
    }


def test_each_side_reads_its_own_pair_and_the_verifiers_public_key(tmp_path: Path) -> None:
    create(tmp_path)
    verifier, drafter = load(tmp_path, "verifier"), load(tmp_path, "drafter")
    assert verifier.public == verifier.verifier == drafter.verifier != drafter.public
    assert verifier.secret != drafter.secret


def test_keys_that_are_there_are_not_overwritten(tmp_path: Path) -> None:
    create(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match="holds files already; name a new folder"):
        create(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_missing_or_broken_key_is_named(tmp_path: Path) -> None:
    create(tmp_path)
    (tmp_path / "laptop.key").write_text("hello")  # among the drafters' keys
    with pytest.raises(ConfigError, match=r"laptop\.key is missing or holds no key"):
        load(tmp_path, "verifier")
    load(tmp_path, "drafter")
    secret = tmp_path / "drafter.key_secret"
    for damage in (lambda: secret.write_text(""), secret.unlink):
        damage()
        with pytest.raises(ConfigError, match=r"drafter\.key_secret is missing or holds no key; .*talon keys DIR"):
            load(tmp_path, "drafter")


def test_the_command_makes_keys_and_refuses_in_one_line(tmp_path: Path) -> None:
    app.command()(keys)
    runner = CliRunner()
    assert runner.invoke(app, ["keys", str(tmp_path / "k")]).exit_code == 0
    again = runner.invoke(app, ["keys", str(tmp_path / "k")])
    assert again.exit_code == 2
    assert again.stderr.count("\n") == 1
