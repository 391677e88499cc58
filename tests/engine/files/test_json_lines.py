from __future__ import annotations

import io

import msgspec
import pytest

from engine.files.json_lines import BadLine, json_lines


class Row(msgspec.Struct):
    text: str


def read(content: bytes) -> list[tuple[int, str]]:
    return [(number, row.text) for number, row in json_lines(io.BytesIO(content), Row)]


def test_lines_end_at_a_newline_and_nowhere_else() -> None:
    separators = "a\u2028b\u2029c\x85d"
    assert read(f'{{"text": "{separators}"}}\r\n{{"text": "e"}}'.encode()) == [(1, separators), (2, "e")]


def test_blank_lines_and_the_mark_before_utf8_are_passed_over() -> None:
    assert read(b'\xef\xbb\xbf{"text": "a"}\n\n  \n{"text": "b"}\n\n') == [(1, "a"), (4, "b")]


@pytest.mark.parametrize(
    "line",
    [
        b"junk", b"[1]", b"{}", b"null", b"NaN", b'{"text": null}', b'{"text": "\\ud800"}', b'{"text": "\xff"}',
        b'{"text": "cut', b"[" * 100_000, b"\x00\x01",
    ],
)  # fmt: skip
def test_a_line_of_another_form_is_named_by_its_number(line: bytes) -> None:
    with pytest.raises(BadLine, match="line 2: ") as error:
        read(b'{"text": "a"}\n' + line + b"\n")
    assert error.value.number == 2 and "\n" not in str(error.value)
