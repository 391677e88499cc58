"""What `talon serve` makes of its options."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import typer

from engine.config import Config
from engine.core.errors import ConfigError
from engine.server.command import KEYS_VARIABLE, read_keys, serve, short_name


def test_without_its_extra_the_command_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "engine.server.run", raising=False)
    with pytest.raises(typer.Exit) as ended:
        serve()
    assert ended.value.exit_code == 2
    assert capsys.readouterr().err == "talon: serve: uvicorn is missing: pip install 'talon-decoding[serve]'\n"


def test_without_the_extra_for_traces_it_says_so_before_it_loads_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(typer.Exit):
        serve(traces="http://localhost:4318", set_=["model=nowhere"])
    said = "--traces http://localhost:4318: opentelemetry.sdk.trace.export is missing"
    assert capsys.readouterr().err == f"talon: {said}: pip install 'talon-decoding[traces]'\n"


def test_the_cache_may_be_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[Config] = []

    async def run_server(config: Config, *_: object) -> None:
        configs.append(config)

    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setattr("engine.server.run.run_server", run_server)
    serve(cache=Path("~/cache"))
    assert [config.verifier.cache for config in configs] == ["/home/ann/cache"]


def test_keys_come_from_the_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("# ours\n one \n\ntwo\n")
    monkeypatch.setenv(KEYS_VARIABLE, "three, four,")
    assert read_keys(tmp_path / "keys") == ("three", "four", "one", "two")
    assert read_keys(None) == ("three", "four")
    monkeypatch.delenv(KEYS_VARIABLE)
    assert read_keys(None) == ()
    (tmp_path / "keys").write_text("# none yet\n")
    with pytest.raises(ConfigError, match="would let everybody in"):
        read_keys(tmp_path / "keys")


@pytest.mark.parametrize("given", ["", " , "])
def test_a_variable_of_keys_that_holds_none_is_refused_and_only_files_have_comments(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("one\n")
    monkeypatch.setenv(KEYS_VARIABLE, given)
    for file in (None, tmp_path / "keys"):
        with pytest.raises(ConfigError, match=f"^{KEYS_VARIABLE}: is set and holds no key; "):
            read_keys(file)
    monkeypatch.setenv(KEYS_VARIABLE, "#s3cret")
    assert read_keys(None) == ("#s3cret",)


def test_a_model_is_called_by_its_name(tmp_path: Path) -> None:
    assert short_name("Qwen/Qwen2.5-0.5B-Instruct") == "Qwen/Qwen2.5-0.5B-Instruct"
    assert short_name("smollm2-135m") == "smollm2-135m"
    (tmp_path / "my-model").mkdir()
    assert short_name(str(tmp_path / "my-model")) == "my-model"
