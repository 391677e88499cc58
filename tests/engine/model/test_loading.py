from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from engine.core.errors import ModelError
from engine.model import loading
from engine.model.decoder import LeanDecoder
from engine.model.decoder_layer import OtherStructure
from engine.model.target import Target


@pytest.mark.parametrize("error", [OSError("a gated repo.\nLog in."), ValueError("no known architecture")])
def test_why_the_hub_gives_no_model_is_told(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    monkeypatch.setattr(loading, "hub_answers", lambda: True)
    monkeypatch.setattr(loading, "is_local", lambda path: False)
    with pytest.raises(ModelError) as caught:
        loading.load_config("Some/Model-1B")
    assert str(caught.value).endswith(f"of that name on the hub ({str(error).splitlines()[0]})")


def test_whatever_an_invalid_file_makes_transformers_raise_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "rope_scaling": 5, "num_attention_heads": 0}')
    with pytest.raises(ModelError, match=r"no usable config\.json") as caught:
        loading.load_config(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="what a process maps is read from /proc")
@pytest.mark.parametrize("lean", [True, False])
def test_a_loaded_model_reads_its_files_no_more(tiny: str, lean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever cuts a file that is mapped ends the process."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OtherStructure

    if not lean:
        monkeypatch.setattr(LeanDecoder, "__init__", refuse)
    target = Target.load(tiny, "float32")
    assert isinstance(target.forward, LeanDecoder) == lean
    gc.collect()
    assert tiny not in Path("/proc/self/maps").read_text()
