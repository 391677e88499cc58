"""A drafter of one's own: a class and a registry line, and every place that lists drafters knows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from drafters.parts import parts
from engine import Config, Engine, SamplingParams
from engine.config import load
from engine.core.drafter_protocol import Drafter, Verdict
from engine.core.errors import ConfigError
from engine.core.methods import GRAMMAR, METHODS, Method, source_name, source_names, source_of
from engine.core.tree import TokenTree

FIRST = [11, 12, 13, 14]


class Knowing(Drafter):
    """Says four tokens, whatever it is asked."""

    @classmethod
    def from_config(cls, config: Config) -> Knowing:
        return cls()

    def start(self, request: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self.last = prompt[-1]

    def propose(self, request: int, continuation: Sequence[int] = ()) -> TokenTree:
        return TokenTree.from_lists([[self.last, *continuation][-1], *FIRST], [-1, 0, 0, 0, 0], [1.0] + 4 * [0.25])

    def observe(self, request: int, verdict: Verdict) -> None:
        self.last = verdict.tokens[-1]

    def finish(self, request: int) -> None:
        pass


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setitem(METHODS, "knowing", Method(f"{__name__}:Knowing"))
    yield "knowing"


async def test_a_drafter_from_outside_drafts_and_is_named(
    tiny: str, registered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model": tiny, "method": registered, "transport": "inproc", "verifier": {"threads": 1}}
    prompt, sampling = [1, 2, 3, 4], SamplingParams(max_tokens=12)
    async with await Engine.start(config, method="none") as engine:
        plain = await engine.generate(prompt, sampling)
    monkeypatch.setattr(f"{__name__}.FIRST", list(dict.fromkeys(plain.token_ids[1:]))[:4])
    async with await Engine.start(config) as engine:
        drafted = await engine.generate(prompt, sampling)
    assert drafted.token_ids == plain.token_ids
    accepted = {bits for round_ in drafted.rounds for bits in round_.sources} - {0}
    assert accepted == {source_of(registered)} and source_names(source_of(registered)) == [registered]
    assert "retrieval" in drafted.sources


def test_a_hybrid_may_be_made_of_it(registered: str) -> None:
    assert parts(load({"method": "hybrid", "drafter": {"memories": ["pld", registered]}})) == (
        "eagle3",
        "pld",
        registered,
    )
    assert parts(load({"method": registered})) == (registered,)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("memories", ["eagle3"], "drafter.memories='eagle3': cannot stand there; these can: pld, suffix"),
        ("head", "suffix", "drafter.head='suffix': cannot stand there; these can: sps, eagle"),
        ("head", "hybrid", "drafter.head='hybrid': cannot stand there"),
        ("memories", ["none"], "drafter.memories='none': cannot stand there"),
        (
            "memories",
            ["lookahead"],
            "drafter.memories='lookahead': cannot stand there; these can: pld, suffix, recycling",
        ),
        ("head", "eagel3", "drafter.head='eagel3': unknown method; did you mean eagle3?"),
        ("head", "zzz", "drafter.head='zzz': unknown method; known: none, "),
    ],
)
def test_what_does_not_go_together_is_refused(key: str, value: object, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parts(load({"method": "hybrid", "drafter": {key: value}}))
    assert str(raised.value).startswith(problem)


def test_every_method_has_a_bit_of_its_own_and_a_kind() -> None:
    bits = [source_of(name) for name in METHODS]
    assert len(set(bits)) == len(METHODS) and max(bits) < 1 << Method(None).bit < GRAMMAR
    assert source_names(source_of("suffix") | source_of("eagle3")) == ["suffix", "eagle3"]
    kinds = [0, source_of("pld"), source_of("pld") | source_of("sps"), source_of("sps") | GRAMMAR]
    assert [source_name(bits) for bits in kinds] == ["target", "retrieval", "head", "grammar"]
