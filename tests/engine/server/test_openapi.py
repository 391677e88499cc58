"""Whatever a request looks like, the server does not fail: generated from its own OpenAPI document."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import HealthCheck, Phase, settings

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.engine.server.process import ServerProcess  # noqa: E402

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)


@pytest.fixture
def document(server: ServerProcess) -> object:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


schema = schemathesis.pytest.from_fixture("document")


@schema.parametrize()
@settings(
    max_examples=40, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
def test_no_request_makes_the_server_fail(case: object) -> None:
    body = case.body  # type: ignore[attr-defined]
    if isinstance(body, dict):  # most reach the engine, and none keeps it busy
        body |= {"model": "tiny"} if isinstance(body.get("model"), str) else {}
        body |= {"n": 1 + body["n"] % 3} if isinstance(body.get("n"), int) else {}
    case.call_and_validate(checks=CHECKS, timeout=60)  # type: ignore[attr-defined]


def test_the_document_names_the_routes(server: ServerProcess) -> None:
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    routes = ("chat/completions", "completions", "models", "models/{model}")
    others = ("/tokenize", "/health", "/ready", "/version", "/metrics")
    assert set(paths) == {f"/v1/{route}" for route in routes} | set(others)
