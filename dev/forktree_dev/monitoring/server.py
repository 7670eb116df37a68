"""A Prometheus of our own that scrapes what it is told, and is asked as Grafana asks it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from forktree_dev import ports
from forktree_dev.monitoring import alerts, programs
from forktree_dev.processes import Service

INTERVAL_SECONDS: Final = 1.0
"""Between two scrapes of one program: a test has no minutes."""
_START_SECONDS: Final = 60.0


class QueryFailed(Exception):
    """Prometheus refused an expression, and says why."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a picture: its labels, and values at times (seconds since the epoch)."""

    labels: Mapping[str, str]
    values: Sequence[tuple[float, float]]


class Prometheus:
    """Has the chart's alerts, and forgets everything when it ends."""

    def __init__(self, service: Service, http: aiohttp.ClientSession) -> None:
        self._service, self._http = service, http

    @classmethod
    @asynccontextmanager
    async def scraping(cls, targets: Mapping[str, str], folder: Path) -> AsyncGenerator[Prometheus]:
        """`targets` are URLs of metrics by the names of their instances. `folder` gets all that it writes.

        Raises `ProcessFailed` with the end of its log, or `TimeoutError`, when it does not come up.
        """
        (port,) = ports.free(1)
        configuration = _written(targets, folder)
        service = Service(
            "prometheus",
            [
                str(programs.folder() / "prometheus"),
                f"--config.file={configuration}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            folder,
        )
        service.start()
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
                running = cls(service, http)
                await running._ready()
                yield running
        finally:
            await service.stop()

    async def _ready(self) -> None:
        async with asyncio.timeout(_START_SECONDS):
            while not await self._answers():
                if self._service.pid is None:
                    raise self._service.failure()
                await asyncio.sleep(0.1)

    async def _answers(self) -> bool:
        try:
            async with self._http.get("/-/ready") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    async def now(self, expr: str) -> list[Series]:
        """What the expression comes to now: series of one value each. Raises `QueryFailed`."""
        found = await self._asked("query", {"query": expr})
        if found["resultType"] == "scalar":
            return [Series({}, [_point(found["result"])])]
        return [Series(each["metric"], [_point(each["value"])]) for each in found["result"]]

    async def between(self, expr: str, start: float, end: float, *, step: float) -> list[Series]:
        """The same over time, in seconds. Raises `QueryFailed`."""
        asked = {"query": expr, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:g}"}
        found = await self._asked("query_range", asked)
        return [Series(each["metric"], [_point(at) for at in each["values"]]) for each in found["result"]]

    async def up(self) -> set[str]:
        """The instances whose last scrape succeeded."""
        return {each.labels["instance"] for each in await self.now("up == 1")}

    async def rules(self) -> dict[str, Mapping[str, Any]]:
        """Each alert by its name: how it stands, and what its last evaluation said."""
        found = await self._asked("rules", {})
        return {rule["name"]: rule for group in found["groups"] for rule in group["rules"]}

    async def _asked(self, what: str, parameters: Mapping[str, str]) -> Mapping[str, Any]:
        async with self._http.get(f"/api/v1/{what}", params=parameters) as answer:
            body: dict[str, Any] = await answer.json()
        if body["status"] != "success":
            raise QueryFailed(f"{parameters.get('query', what)}: {body['error']}")
        data: Mapping[str, Any] = body["data"]
        return data


def _point(pair: Sequence[Any]) -> tuple[float, float]:
    return float(pair[0]), float(pair[1])  # Values are texts, so that NaN can be among them.


def _written(targets: Mapping[str, str], folder: Path) -> Path:
    """The file that it is told all by."""
    folder.mkdir(parents=True, exist_ok=True)
    rules, configuration = folder / "rules.yaml", folder / "prometheus.yaml"
    rules.write_text(json.dumps(alerts.manifest()["spec"]))  # JSON is YAML.
    configuration.write_text(json.dumps(_configuration(targets, rules)))
    return configuration


def _configuration(targets: Mapping[str, str], rules: Path) -> Mapping[str, Any]:
    def scraped(instance: str, url: str) -> Mapping[str, Any]:
        address = url.removeprefix("http://").removesuffix("/metrics")
        return {"targets": [address], "labels": {"instance": instance}}

    every = f"{INTERVAL_SECONDS:g}s"
    found = [scraped(instance, url) for instance, url in targets.items()]
    return {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "forktree", "static_configs": found}],
    }
