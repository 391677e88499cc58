"""The type of the answers that a route documents."""

from __future__ import annotations

from typing import Any

OpenApiResponses = dict[int | str, dict[str, Any]]
"""What OpenAPI's document says of a route's answers, by status, as FastAPI takes it."""
