"""Decompresses request bodies."""

from __future__ import annotations

import zlib

from engine.server.errors import ApiError

_GZIP = 16 + zlib.MAX_WBITS
_CODINGS = ("gzip", "x-gzip")


class Gunzip:
    """Decompresses a body part by part. most: maximum bytes of the result: a small file may hold gigabytes."""

    def __init__(self, most: int):
        self._left = most
        self._member = zlib.decompressobj(_GZIP)

    def feed(self, data: bytes) -> bytes:
        """Return the text of the next part; one byte more than allowed if there is too much. Raises ApiError for what
        is not gzip.
        """
        text = b""
        try:
            while data and self._left >= 0:
                if self._member.eof:  # a file may have several members
                    self._member = zlib.decompressobj(_GZIP)
                text += (part := self._member.decompress(data, self._left + 1))
                self._left -= len(part)
                data = self._member.unused_data
        except zlib.error:
            raise ApiError(400, "the body is not gzip, as Content-Encoding says", code="invalid_encoding") from None
        return text

    def end(self) -> None:
        """Raise ApiError unless the body was complete."""
        if not self._member.eof:
            raise ApiError(400, "the body's gzip is cut off; send all of it", code="invalid_encoding")


def gunzip_for(coding: str, most: int) -> Gunzip | None:
    """Return what decompresses a body of that Content-Encoding; None if it is not compressed. Raises ApiError for
    others.
    """
    name = coding.strip().lower()
    if name in ("", "identity"):
        return None
    if name not in _CODINGS:
        raise ApiError(415, f"Content-Encoding: {coding[:64]} is not read here; send gzip, or plain JSON")
    return Gunzip(most)
