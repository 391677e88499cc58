"""Whatever a request looks like, the server does not fail: generated from its own OpenAPI document."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.engine.server.process import ServerProcess

ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/infill"),
    ("POST", "/tokenize"),
    ("GET", "/prompts"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/version"),
    ("GET", "/metrics"),
]
POSTS = [(*route, "negative") for route in ROUTES if route[0] == "POST"]  # nothing is wrong with a path
CASES = [*((*route, "positive") for route in ROUTES), *POSTS]
generated = settings(
    deadline=None, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


@pytest.fixture(scope="module")
def document(server: ServerProcess) -> Any:
    schemathesis = pytest.importorskip("schemathesis")  # not above: it takes seconds, in each of pytest's processes
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.parametrize("examples", [8, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_no_request_makes_the_server_fail(document: Any, method: str, path: str, mode: str, examples: int) -> None:
    """mode: as the document wants it, or not."""
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    conforming = (checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance)

    @settings(generated, max_examples=examples)
    @given(case=document[path][method].as_strategy(generation_mode=GenerationMode(mode)))
    def holds(case: Any) -> None:
        if isinstance(case.body, dict):  # most reach the engine, and none keeps it busy
            case.body |= {"model": "tiny"} if isinstance(case.body.get("model"), str) else {}
            case.body |= {"n": 1 + case.body["n"] % 3} if isinstance(case.body.get("n"), int) else {}
        case.call_and_validate(checks=(not_a_server_error, *conforming), timeout=60)

    holds()


def test_the_routes_are_all_that_the_document_names(server: ServerProcess) -> None:
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert {(method.upper(), path) for path, methods in paths.items() for method in methods} == set(ROUTES)
