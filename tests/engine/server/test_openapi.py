"""Whatever a request looks like, the server does not fail: generated from its own OpenAPI document."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.engine.server.process import ServerProcess  # noqa: E402

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/{response_id}"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/tokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/version"),
    ("GET", "/metrics"),
]
CASES = [
    (*route, mode)
    for route in ROUTES
    for mode in schemathesis.GenerationMode
    if route[0] == "POST" or mode is schemathesis.GenerationMode.POSITIVE  # nothing is wrong with a path
]
generated = settings(
    max_examples=40, deadline=None, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


@pytest.mark.parametrize(("method", "path", "mode"), CASES, ids=lambda value: getattr(value, "value", value))
def test_no_request_makes_the_server_fail(server: ServerProcess, method: str, path: str, mode: Any) -> None:
    """mode: as the document wants it, or not."""
    operation = schemathesis.openapi.from_url(f"{server.url}/openapi.json")[path][method]

    @generated
    @given(case=operation.as_strategy(generation_mode=mode))
    def holds(case: Any) -> None:
        if isinstance(case.body, dict):  # most reach the engine, and none keeps it busy
            case.body |= {"model": "tiny"} if isinstance(case.body.get("model"), str) else {}
            case.body |= {"n": 1 + case.body["n"] % 3} if isinstance(case.body.get("n"), int) else {}
        case.call_and_validate(checks=CHECKS, timeout=60)

    holds()


def test_the_document_names_the_routes(server: ServerProcess) -> None:
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert set(paths) == {path for _, path in ROUTES}
