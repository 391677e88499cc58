"""Two replicas under Ray Serve, one of them killed under load."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tests.conftest import free_port
from tests.engine.server.figures import until
from tests.engine.server.process import ROOT

pytest.importorskip("ray", reason="pip install 'talon-decoding[ray]'")
CLIENTS, SECONDS = 8, 40


def test_the_configuration_that_ships_is_ray_serves_and_ours() -> None:
    from ray.serve.schema import ServeDeploySchema

    from engine.server.deployment import Arguments

    file = yaml.safe_load((ROOT / "configs" / "serve-ray.yaml").read_text())
    (application,) = ServeDeploySchema.model_validate(file).applications
    assert Arguments.model_validate(application.args).model == "smollm2-135m"
    assert {deployment.name for deployment in application.deployments} == {"FrontDoor", "Replica"}


@pytest.fixture
def cluster(tiny: str, tmp_path: Path) -> Iterator[str]:
    """The URL of two replicas of a tiny model."""
    file = yaml.safe_load((ROOT / "configs" / "serve-ray.yaml").read_text())
    port = file["http_options"]["port"] = free_port()
    (application,) = file["applications"]
    overrides = {"model": tiny, "method": "pld", "verifier.threads": 1}
    application["args"] = {"model": "tiny", "overrides": overrides}
    application["deployments"][1]["autoscaling_config"] |= {"min_replicas": 2, "max_replicas": 2}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(file))
    serve = [str(Path(sys.executable).with_name("serve")), "run", str(tmp_path / "serve.yaml")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(serve, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: status(f"{url}/ready") == 200, 180)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.mark.slow
def test_a_replica_that_is_killed_costs_no_more_than_what_it_was_streaming(cluster: str) -> None:
    came = asyncio.run(under_load(cluster))
    failed = sum(count for kind, count in came.items() if kind not in ("plain 200", "stream 200"))
    assert came["plain 200"] > CLIENTS and came["stream 200"] > CLIENTS
    assert all(kind.startswith("stream") for kind in came if kind != "plain 200"), came
    assert failed <= CLIENTS, came
    until(lambda: len(replicas()) == 2, 120)


async def under_load(url: str) -> Counter[str]:
    """What came of the requests of some clients, half of them streamed; a replica is killed after a while."""
    came: Counter[str] = Counter()
    loop = asyncio.get_running_loop()
    end = loop.time() + SECONDS

    async def client(name: int, http: httpx.AsyncClient) -> None:
        while loop.time() < end:
            for stream in (True, False):
                came[f"{'stream' if stream else 'plain'} {await ask(http, name, stream)}"] += 1

    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        clients = [asyncio.create_task(client(name, http)) for name in range(CLIENTS)]
        await asyncio.sleep(SECONDS / 4)
        replicas()[0].kill()
        await asyncio.gather(*clients)
    return came


async def ask(http: httpx.AsyncClient, name: int, stream: bool) -> object:
    """The status of an answer, or what ended it."""
    body = {"model": "tiny", "prompt": f"{name} 1 2 3 1 2 3", "max_tokens": 100, "stream": stream, "ignore_eos": True}
    try:
        answer = await http.post("/v1/completions", json=body, headers={"X-Session-Id": f"session {name}"})
    except httpx.HTTPError as error:
        return type(error).__name__
    whole = not stream or ('"error"' not in answer.text and answer.text.endswith("data: [DONE]\n\n"))
    return answer.status_code if whole else "broken off"


def replicas() -> list[psutil.Process]:
    named = ((process, process.info["cmdline"] or [""]) for process in psutil.process_iter(["cmdline"]))
    return [process for process, command in named if "ServeReplica:talon:Replica" in command[0]]


def status(url: str) -> int:
    try:
        return httpx.get(url, timeout=5).status_code
    except httpx.HTTPError:
        return 0
