"""The dashboard drawn from a real Prometheus: `python -m forktree_dev.monitoring.picture FILE.png`.

Not by Grafana, which is in no package registry that development uses: the panels' places, titles, units,
queries and legends are those of the file that Grafana imports, and the rest is made to look much like it.
Needs extra `bench`.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import math
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, cast

from forktree_dev.monitoring import dashboard
from forktree_dev.monitoring.server import INTERVAL_SECONDS, Prometheus
from forktree_dev.monitoring.working import Work, metrics_urls
from forktree_dev.system import Sizes, System

_UNIT_INCHES: Final = (0.8, 0.42)
"""Of one step of Grafana's grid."""
_INK, _PAPER, _FAINT = "#24292e", "#ffffff", "#d8d9da"
_WINDOW: Final = "15s"
"""That rates are taken over: Grafana takes four times the interval of scrapes, at least."""
_QUIET_SECONDS: Final = 5.0
"""Before and after the work, so that its begin and end are seen."""
_ROUNDS: Final = 4


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a panel, as it is called there."""

    name: str
    points: Sequence[tuple[float, float]]

    @property
    def last(self) -> float:
        return next((value for _, value in reversed(self.points) if not math.isnan(value)), math.nan)


def written(value: float, unit: str) -> str:
    """A number as Grafana writes it."""
    if math.isnan(value):
        return "none"
    match unit:
        case "s":
            for factor, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
                if value >= factor or name == "µs":
                    return f"{value / factor:.3g} {name}" if value else "0 s"
        case "bytes":
            for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
                if value >= 1 << power:
                    return f"{value / (1 << power):.3g} {name}"
            return f"{value:.0f} B"
        case "ops":
            return f"{value:.3g} ops/s"
        case _:
            return f"{value:.4g}"
    raise AssertionError(unit)


async def lines_of(
    panel: Mapping[str, Any], prometheus: Prometheus, start: float, end: float
) -> Sequence[Line]:
    """All lines of a panel of the file, between two times."""
    found: list[Line] = []
    span = f"{math.ceil(end - start)}s"
    for target in panel["targets"]:
        expr, legend = dashboard.asked(target["expr"], window=_WINDOW, span=span), target["legendFormat"]
        series = await prometheus.between(expr, start, end, step=INTERVAL_SECONDS)
        found += [Line(dashboard.called(legend, each.labels), each.values) for each in series]
    return found


async def draw(prometheus: Prometheus, start: float, end: float, file: Path) -> None:
    """The whole dashboard, as it was between two times."""
    panels: list[dict[str, Any]] = dashboard.document()["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figures = cast("Any", importlib.import_module("matplotlib.figure"))
    size = (dashboard.WIDTH * _UNIT_INCHES[0], rows * _UNIT_INCHES[1])
    figure = figures.Figure(figsize=size, facecolor="#f4f5f5")
    for panel in panels:
        at = panel["gridPos"]
        left, top = at["x"] / dashboard.WIDTH, 1 - at["y"] / rows
        width, height = at["w"] / dashboard.WIDTH, at["h"] / rows
        if panel["type"] == "row":
            figure.text(left + 0.004, top - height * 0.7, panel["title"], size=13, weight="bold", color=_INK)
            continue
        box = figure.add_axes((left + 0.002, top - height + 0.002, width - 0.004, height - 0.004))
        box.set(xticks=[], yticks=[], facecolor=_PAPER)
        for spine in box.spines.values():
            spine.set_color(_FAINT)
        box.text(
            0.02,
            0.97,
            panel["title"],
            size=10.5,
            weight="bold",
            va="top",
            color=_INK,
            transform=box.transAxes,
        )
        lines = await lines_of(panel, prometheus, start, end)
        if panel["type"] == "stat":
            _numbers(box, panel, lines)
        else:
            inner = figure.add_axes(
                (left + width * 0.13, top - height * 0.62, width * 0.84, height * 0.46), facecolor=_PAPER
            )
            inner.set_xlim(start, end)
            _curves(inner, panel, lines)
            _legend(box, lines)
    figure.savefig(str(file), dpi=90)


def _numbers(box: Any, panel: Mapping[str, Any], lines: Sequence[Line]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    unit, steps = defaults["unit"], defaults["thresholds"]["steps"]
    for index, line in enumerate(lines):
        across = (index + 0.5) / len(lines)
        colour = [step["color"] for step in steps if step["value"] is None or line.last >= step["value"]][-1]
        box.text(across, 0.46, written(line.last, unit), size=26, ha="center", va="center", color=colour)
        box.text(across, 0.12, line.name, size=10, ha="center", color=_INK)


def _curves(axes: Any, panel: Mapping[str, Any], lines: Sequence[Line]) -> None:
    ticks = cast("Any", importlib.import_module("matplotlib.ticker"))
    defaults = panel["fieldConfig"]["defaults"]
    if defaults["custom"]["stacking"]["mode"] == "normal":
        times = sorted({at for line in lines for at, _ in line.points})
        values = [dict(line.points) for line in lines]
        axes.stackplot(times, [[each.get(at, 0.0) for at in times] for each in values], alpha=0.6)
    else:
        for line in lines:
            known = [(at, value) for at, value in line.points if not math.isnan(value)]
            axes.plot([at for at, _ in known], [value for _, value in known], linewidth=1.2)
    if defaults["custom"]["scaleDistribution"]["type"] == "log":
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(ticks.NullFormatter())
    else:
        axes.set_ylim(bottom=defaults["min"])
        axes.locator_params(axis="y", nbins=4)
    if defaults["unit"] == "bytes":
        highest = max((value for line in lines for _, value in line.points), default=1.0)
        axes.yaxis.set_major_locator(ticks.MultipleLocator(2 ** math.ceil(math.log2(highest / 4))))

    def number(value: float, _: int) -> str:
        return written(value, defaults["unit"])

    def clock(value: float, _: int) -> str:
        return f"{datetime.fromtimestamp(value):%H:%M:%S}"

    axes.yaxis.set_major_formatter(number)
    axes.xaxis.set_major_formatter(clock)
    axes.locator_params(axis="x", nbins=5)
    axes.tick_params(which="both", labelsize=8, colors=_INK, length=0)
    axes.grid(True, color="#e6e7e8", linewidth=0.7)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _legend(box: Any, lines: Sequence[Line]) -> None:
    """Below the curves, in as many columns as the names leave room for."""
    colours = [f"C{index % 10}" for index in range(len(lines))]
    columns = 2 if all(len(line.name) < 34 for line in lines) else 1
    per_column = math.ceil(len(lines) / columns)
    step = min(0.052, 0.27 / max(per_column, 1))
    for index, (line, colour) in enumerate(zip(lines, colours, strict=True)):
        column, row = divmod(index, per_column)
        left, down = 0.03 + column * 0.48, 0.275 - row * step
        box.plot([left, left + 0.02], [down + 0.012] * 2, color=colour, linewidth=3, transform=box.transAxes)
        box.text(left + 0.03, down, line.name, size=min(8.5, step * 160), color=_INK, transform=box.transAxes)


@asynccontextmanager
async def worked(folder: Path) -> AsyncGenerator[tuple[Prometheus, float, float]]:
    """A Prometheus that has seen a system at work between two times."""
    async with (
        System.running(folder / "system", sizes=Sizes(memory_limit_bytes=6 << 30)) as system,
        Prometheus.running(folder / "prometheus") as prometheus,
        Work.begun(system) as work,
    ):
        await prometheus.scrape(lambda: metrics_urls(system))
        start = time.time()
        await asyncio.sleep(_QUIET_SECONDS)
        for number in range(_ROUNDS):
            await work.search(depth=3, width=3)
            await work.by_objects()
            if number % 3 == 1:
                await work.mistakes()
        await work.outage(lambda: asyncio.sleep(_QUIET_SECONDS))
        await prometheus.scrape(lambda: metrics_urls(system))
        for _ in range(2):
            await work.search(depth=3, width=4)
        async with work.standing(width=3):
            await asyncio.sleep(_QUIET_SECONDS)
            yield prometheus, start, time.time()


async def _drawn(file: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="forktree-picture-") as folder:
        async with worked(Path(folder)) as (prometheus, start, end):
            await draw(prometheus, start, end, file)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m forktree_dev.monitoring.picture", description="Draw the dashboard."
    )
    parser.add_argument("file", type=Path, help="a PNG")
    asyncio.run(_drawn(parser.parse_args().file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
