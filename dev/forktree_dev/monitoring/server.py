"""A Prometheus of our own that scrapes what it is told, and is asked as Grafana asks it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
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

    def __init__(self, service: Service, http: aiohttp.ClientSession, targets: Path) -> None:
        self._service, self._http, self._targets = service, http, targets

    @classmethod
    @asynccontextmanager
    async def running(cls, folder: Path) -> AsyncGenerator[Prometheus]:
        """Scraping nobody yet. `folder` gets all that it writes.

        Raises `ProcessFailed` with the end of its log, or `TimeoutError`, when it does not come up.
        """
        (port,) = ports.free(1)
        targets = folder / "targets.json"
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
                running = cls(service, http, targets)
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

    async def scrape(self, urls: Callable[[], Mapping[str, str]]) -> None:
        """Return once all are scraped that `urls` tells: URLs of metrics by the names of their instances.

        It is asked again and again, since who starts anew may be at another port. Raises `TimeoutError`.
        """
        async with asyncio.timeout(_START_SECONDS):
            while True:
                told = urls()
                self._aim(told)
                if {each.labels["instance"] for each in await self.now("up == 1")} == set(told):
                    return
                await asyncio.sleep(0.2)

    def _aim(self, urls: Mapping[str, str]) -> None:
        found = [
            {
                "targets": [url.removeprefix("http://").removesuffix("/metrics")],
                "labels": {"instance": instance},
            }
            for instance, url in urls.items()
        ]
        text = json.dumps(found)
        if not self._targets.exists() or self._targets.read_text() != text:
            draft = self._targets.with_suffix(".draft")
            draft.write_text(text)
            draft.rename(self._targets)

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


def _written(targets: Path, folder: Path) -> Path:
    """The file that it is told all by."""
    folder.mkdir(parents=True, exist_ok=True)
    rules, configuration = folder / "rules.yaml", folder / "prometheus.yaml"
    rules.write_text(json.dumps(alerts.manifest()["spec"]))  # JSON is YAML.
    configuration.write_text(json.dumps(_configuration(targets, rules)))
    return configuration


def _configuration(targets: Path, rules: Path) -> Mapping[str, Any]:
    every = f"{INTERVAL_SECONDS:g}s"
    looked_up = {"files": [str(targets)], "refresh_interval": every}
    return {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "forktree", "file_sd_configs": [looked_up]}],
    }
