"""JSON lines from elsewhere, checked line by line.

Lines end at "\\n" and nowhere else: U+2028 and the like may occur in a text. Blank lines and a byte order mark at the
start are skipped. Lone surrogates are not valid text.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec

Row = TypeVar("Row")


class BadLine(ValueError):
    """A line does not have the expected form. number: of the line, from 1."""

    def __init__(self, number: int, reason: str):
        super().__init__(f"line {number}: {reason}")
        self.number, self.reason = number, reason


def json_lines(file: Iterable[bytes], row_type: type[Row]) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a file opened in binary mode, each with the number of its line. Raises BadLine."""
    decoder = msgspec.json.Decoder(row_type)
    for number, line in enumerate(file, start=1):
        line = line.removeprefix(codecs.BOM_UTF8).strip() if number == 1 else line.strip()
        if not line:
            continue
        try:
            row = decoder.decode(line)
        except msgspec.ValidationError as error:
            raise BadLine(number, str(error).replace("`", "").replace("$.", "")) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise BadLine(number, "is not JSON in UTF-8") from None
        yield number, row
