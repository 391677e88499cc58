"""Keeps the responses that clients may go on from: in memory, bounded, each for its key alone."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.core.errors import printable
from engine.server.errors import ApiError

_MOST = 4096
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class StoredResponse:
    """A response that a client may go on from. key: of the client that it was for. conversation: its chat messages and
    the answer's, without instructions. size: in bytes.
    """

    key: bytes
    response: dict[str, Any]
    conversation: list[dict[str, Any]]
    size: int


class ResponseStore:
    """The latest responses; those that were used longest ago are forgotten first."""

    def __init__(self, most: int = _MOST, most_bytes: int = _MOST_BYTES):
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes = 0

    def add(self, key: bytes, response: dict[str, Any], conversation: list[dict[str, Any]]) -> None:
        """Keep a response, if it is not too large."""
        size = len(msgspec.json.encode((response, conversation)))
        if size > self._most_bytes:
            return
        self._kept[response["id"]] = StoredResponse(key, response, conversation, size)
        self._bytes += size
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            self._bytes -= self._kept.popitem(last=False)[1].size

    def find(self, number: str, key: bytes, field: str = "response_id") -> StoredResponse:
        """Return a response by its id. Raises ApiError if it is not there, or another key's."""
        found = self._used(number, key)
        if found is None:
            message = f"{field}: {printable(number, 100)} is not there: it was never stored, or is forgotten by now"
            raise ApiError(404, message, code="previous_response_not_found", param=field)
        return found

    def item(self, number: str, key: bytes) -> dict[str, Any]:
        """Return an item of a response's output by the item's id, which holds the response's. Raises ApiError as `find`
        does.
        """
        response = self._used(f"resp_{number.partition('_')[2].rpartition('_')[0]}", key)
        output: list[dict[str, Any]] = [] if response is None else response.response["output"]
        if (found := next((item for item in output if item["id"] == number), None)) is None:
            told = "It was never stored, or is forgotten by now; send the item itself."
            raise ApiError(404, f"Item with id '{printable(number, 100)}' not found. {told}", param="input")
        return found

    def _used(self, number: str, key: bytes) -> StoredResponse | None:
        """Return a response by its id, which is used now; None if it is not there, or another key's."""
        found = self._kept.get(number)
        if found is None or found.key != key:
            return None
        self._kept.move_to_end(number)
        return found

    def remove(self, number: str, key: bytes) -> None:
        """Forget a response. Raises ApiError as `find` does."""
        self._bytes -= self.find(number, key).size
        del self._kept[number]
