"""Which replica a request belongs to."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from engine.server.affinity import session_of


def body(**fields: object) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


def test_the_header_decides_where_there_is_one() -> None:
    assert session_of("ann", body(prompt="a")) == session_of("ann", body(prompt="b")) == "ann"


def test_the_turns_of_a_conversation_belong_together_and_others_do_not() -> None:
    turns = [{"role": "system", "content": "s" * 600}, {"role": "user", "content": "u" * 600}]
    later = [*turns, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]
    assert session_of(None, body(messages=turns)) == session_of(None, body(messages=later, temperature=0))
    other = [turns[0], {"role": "user", "content": "v" * 600}]
    assert session_of(None, body(messages=turns)) != session_of(None, body(messages=other))


def test_prompts_count_by_their_beginning_as_texts_and_as_tokens() -> None:
    assert session_of(None, body(prompt="a" * 2000)) == session_of(None, body(prompt="a" * 3000))
    assert session_of(None, body(prompt="a")) == session_of(None, body(prompt=["a", "b"]))
    assert session_of(None, body(prompt=[1, 2])) == session_of(None, body(prompt=[[1, 2], [3]]))
    assert session_of(None, body(prompt=[1, 2])) != session_of(None, body(prompt=[2, 1]))


@given(st.binary() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(lambda v: body(messages=v)))
def test_whatever_a_body_holds_it_has_a_session(content: bytes) -> None:
    assert len(session_of(None, content)) == 64
