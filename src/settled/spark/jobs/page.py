"""A report's figures as one HTML file with drawings in it; it needs nothing from anywhere."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from html import escape
from importlib import resources
from typing import Any

from settled.spark.jobs.owners import section

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 960, 240, 64, 28, 12, 12
FEW = 5
"""So few points are drawn with their value."""
COLOURS = {"acked": "#2f7d5b", "retried": "#d9932b", "released": "#7a8aa0", "dead": "#b8383d"}
LINES = {"p50": "#2f7d5b", "p90": "#d9932b", "p99": "#b8383d"}


def render(figures: dict[str, Any]) -> str:
    """The whole page."""
    template = resources.files("settled.spark.jobs").joinpath("page.html").read_text(encoding="utf-8")
    span = (
        f"{_when(figures['from'])} to {_when(figures['to'])}"
        if figures["from"]
        else "nothing was settled yet"
    )
    width = figures["bucket_seconds"]
    # One axis for all drawings, so that what happened at the same time stands in the same place.
    moments = [r["t"] for name in ("throughput", "latency", "in_hand") for r in figures[name]]
    times = _steps(min(moments), max(moments), width) if moments else []
    parts = {
        "TITLE": escape(_title(figures)),
        "SPAN": escape(span),
        "MADE": escape(_when(figures["made_at"])),
        "TILES": _tiles(figures),
        "NOT_KNOWN": _not_known(figures),
        "ALERTS": _alerts(figures["alerts"]),
        "THROUGHPUT": _stacked(figures["throughput"], times, width),
        "WIDTH": _span(width),
        "LATENCY": _lines(figures["latency"], times, width),
        "IN_HAND": _lines(figures["in_hand"], times, width),
        "REDELIVERIES": _bars(
            [(r["reason"], r["count"], r["source"]) for r in figures["redeliveries"]], "#d9932b"
        ),
        "RETRIES": _bars(
            [
                (f"after {r['attempts']} failed attempt{'s' * (r['attempts'] > 1)}", r["count"], "")
                for r in figures["retries_to_success"]
            ],
            "#2f7d5b",
        ),
        "DEAD": _dead(figures["dead_letters"]["errors"]),
        "OWNERS": section(figures.get("owners", [])),
        "LAG_AT": escape(_when(figures["lag_at"])),
        "LAG": _lag(figures["lag"]),
    }
    return re.sub("@([A-Z_]+)@", lambda found: parts[found[1]], template)  # once: texts may look like marks


def _title(figures: dict[str, Any]) -> str:
    noun = "stream" if figures.get("streams") else "queue"
    return f"{noun.capitalize()} {figures['queue']}" if figures["queue"] else f"All {noun}s"


def _not_known(figures: dict[str, Any]) -> str:
    """What the figures leave out, said above them."""
    consumers = figures.get("only_dead_letters", [])
    names = ", ".join(f"{one['consumer_group'] or '-'} of {one['queue']}" for one in consumers)
    if not names and figures["totals"]["acked"] is not None:
        return ""
    return (
        f"<section><h2>Not known here</h2><p>Of {escape(names) or 'consumers'} that are no pipeline only "
        "dead letters are known, and counted. What else they acknowledged, tried again or gave back, and "
        "what waits for them, is in no figure below: see their own metrics.</p></section>"
    )


def _when(text: str | None) -> str:
    return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if text else ""


def _tiles(figures: dict[str, Any]) -> str:
    totals = figures["totals"]
    known = totals["acked"] is not None
    settled = totals["acked"] + totals["dead"] if known else 0
    share = f"{100 * totals['acked'] / settled:.2f} % of what is settled" if settled else ""
    waiting = sum(r["waiting"] + r["failing"] for r in figures["lag"]) if known else None
    tiles = [
        ("acknowledged", totals["acked"], share, COLOURS["acked"]),
        ("tried again", totals["retried"], "failed attempts that came again", COLOURS["retried"]),
        ("dead letters", totals["dead"], "never again, kept with their error", COLOURS["dead"]),
        ("released", totals["released"], "given back, no attempt counted", COLOURS["released"]),
        ("waiting", waiting, f"over all groups, {_when(figures['lag_at'])}", "#3d4b5f"),
    ]
    return "".join(
        f'<div class="tile"><b style="color:{colour}">{"?" if value is None else f"{value:,}"}</b>'
        f"<span>{name}</span><small>{escape('not known here' if value is None else note)}</small></div>"
        for name, value, note, colour in tiles
    )


def _alerts(alerts: list[dict[str, Any]]) -> str:
    rows = []
    for alert in alerts:
        state, when = "quiet", "never"
        if not alert.get("known", True):
            state, when = "not known", "not known: it counts what came again, too"
        if alert["fired"]:
            times = len(alert["fired"])
            state, when = "fired", f"{f'{times} times, first ' * (times > 1)}{_when(alert['fired'][0])}"
        elif alert["pending_since"]:
            state, when = "pending", f"not yet; over the limit since {_when(alert['pending_since'])}"
        rate = f"{alert['worst_rate']:,.1f}/min"
        if state == "not known":
            rate = f"at least {rate}" if alert["worst_rate"] else "?"
        rows.append(
            f'<tr><td><i class="{state.replace(" ", "-")}">{state}</i></td>'
            f"<td><b>{escape(alert['name'])}</b><br>"
            f"{escape(alert['text'])}</td>"
            f'<td class="n">{alert["threshold"]:g}/min<br><small>for {alert["minutes"]} min</small></td>'
            f'<td class="n">{rate}</td><td>{escape(when)}</td></tr>'
        )
    return (
        "<table><tr><th></th><th>rule</th><th class='n'>limit</th><th class='n'>worst rate</th>"
        "<th>fired</th></tr>" + "".join(rows) + "</table>"
    )


def _span(seconds: float) -> str:
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute"), (1, "second")):
        if seconds >= size and seconds % size == 0:
            count = round(seconds / size)
            return unit if count == 1 else f"{count} {unit}s"
    return f"{seconds:g} seconds"


def _scale(top: float) -> tuple[float, list[float]]:
    """A round maximum and the lines to draw."""
    if top <= 0:
        return 1.0, [0.0, 1.0]
    step = (
        10.0 ** (len(str(int(top))) - 1)
        if top >= 1
        else 10.0 ** -next(i for i in range(1, 12) if top * 10**i >= 1)
    )
    for factor in (0.2, 0.5, 1, 2, 5):
        if top / (step * factor) <= 5:
            step *= factor
            break
    count = int(-(-top // step))
    return step * count, [step * i for i in range(count + 1)]


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _frame(times: list[float], lines: list[float], top: float, unit: str) -> str:
    parts = []
    for value in lines:
        y = _y(value, top)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" class="tick" text-anchor="end">'
            f"{_short(value)}{unit}</text>"
        )
    last = -1e9
    for time in times:
        x = _x(time, times)
        if x - last >= 110:
            last = x
            span = times[-1] - times[0]
            shape = "%H:%M:%S" if span < 7200 else "%d %b %H:%M"
            text = datetime.fromtimestamp(time, UTC).strftime(shape)
            parts.append(
                f'<text x="{x:.1f}" y="{HEIGHT - 8}" class="tick" text-anchor="middle">{text}</text>'
            )
    return "".join(parts)


def _x(time: float, times: list[float]) -> float:
    """The middle of a time's slot."""
    inner = WIDTH - LEFT - RIGHT
    slots = len(times)
    return LEFT + inner * (times.index(time) + 0.5) / slots


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / top


def _steps(first: float, last: float, width: float) -> list[float]:
    """All slots from the first to the last, also those in which nothing happened."""
    count = round((last - first) / width) + 1
    return [first + i * width for i in range(count)]


def _key(time: float, width: float) -> int:
    return round(time / width)


def _stacked(rows: list[dict[str, Any]], times: list[float], width: float) -> str:
    if not rows:
        return _nothing("Nothing was settled in this time.")
    found = {_key(r["t"], width): r for r in rows}
    top, lines = _scale(max(sum(r[k] for k in COLOURS) for r in rows))
    thick = max(1.0, (WIDTH - LEFT - RIGHT) / len(times) * 0.82)
    bars = []
    for time in times:
        row, base = found.get(_key(time, width)), 0.0
        for kind, colour in COLOURS.items() if row else ():
            value = row[kind]  # type: ignore[index]
            if value:
                high, low = _y(base + value, top), _y(base, top)
                tip = f"{datetime.fromtimestamp(time, UTC):%H:%M:%S}: {row[kind]:,} {kind}"  # type: ignore[index]
                bars.append(
                    f'<rect x="{_x(time, times) - thick / 2:.1f}" y="{high:.1f}" width="{thick:.1f}" '
                    f'height="{max(low - high, 0.6):.1f}" fill="{colour}"><title>{tip}</title></rect>'
                )
                base += value
    kinds = {kind: colour for kind, colour in COLOURS.items() if any(r[kind] for r in rows)}
    return _svg(_frame(times, lines, top, "") + "".join(bars)) + _legend(kinds)


def _lines(rows: list[dict[str, Any]], times: list[float], width: float) -> str:
    if not rows:
        return _nothing("No settlement was timed.")
    top, lines = _scale(1.05 * max(r["p99"] for r in rows))
    near = {_key(t, width): t for t in times}
    drawn = []
    # A batch that is settled at once has one time for all: one line says so, three would hide each other.
    same = all(r["p99"] - r["p50"] <= 0.01 * top for r in rows)
    curves = {"p99": LINES["p50"]} if same else LINES
    for name, colour in curves.items():
        points = [(_x(near[_key(r["t"], width)], times), _y(r[name], top), r) for r in rows]
        drawn.append(
            f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)}" stroke="{colour}"/>'
        )
        drawn += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}">'
            f"<title>{datetime.fromtimestamp(r['t'], UTC):%H:%M:%S}: "
            f"{'all' if same else name} {r[name]:.3g} s</title></circle>"
            for x, y, r in points
        ]
    if len(rows) <= FEW:
        drawn += [
            f'<text x="{_x(near[_key(r["t"], width)], times):.1f}" y="{_y(r["p99"], top) - 8:.1f}" '
            f'class="tick" text-anchor="middle">{r["p99"]:.3g} s</text>'
            for r in rows
        ]
    labels = {"half, nine in ten and 99 in 100 alike": LINES["p50"]} if same else LINES
    return _svg(_frame(times, lines, top, " s") + "".join(drawn)) + _legend(labels)


def _svg(inner: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{inner}</svg>'


def _legend(colours: dict[str, str]) -> str:
    return (
        '<p class="legend">'
        + "".join(f'<span><i style="background:{c}"></i>{n}</span>' for n, c in colours.items())
        + "</p>"
    )


def _bars(rows: list[tuple[str, int, str]], colour: str) -> str:
    if not rows:
        return _nothing("None.")
    top = max(count for _, count, _ in rows)
    return (
        '<div class="bars">'
        + "".join(
            f'<div class="name" title="{escape(name)}">{escape(name)}<small>{escape(note)}</small></div>'
            f'<div class="track"><i style="width:{max(100 * count / top, 0.5):.1f}%;'
            f'background:{colour}"></i></div>'
            f'<div class="n">{count:,}</div>'
            for name, count, note in rows
        )
        + "</div>"
    )


def _dead(errors: list[dict[str, Any]]) -> str:
    if not errors:
        return _nothing("No dead letters.")
    rows = "".join(
        f"<tr><td><b>{escape(e['error'])}</b><br>"
        f"<small>for example: {escape(e['example'] or '')}</small></td>"
        f"<td>{escape(e['queue'])}<br><small>{escape(e['consumer_group'])}</small></td>"
        f'<td class="n">{e["count"]:,}</td>'
        f'<td class="n">{e["attempts"]}</td><td>{escape(_when(e["last"]))}</td></tr>'
        for e in errors
    )
    return (
        "<table><tr><th>error</th><th>queue, group</th><th class='n'>count</th><th class='n'>attempts</th>"
        "<th>last</th></tr>" + rows + "</table>"
    )


def _lag(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return _nothing("No group has read yet.")
    body = "".join(
        f"<tr><td>{escape(r['queue'])}</td><td>{escape(r['consumer_group'])}</td>"
        f'<td class="n">{r["partitions"]}</td>'
        f'<td class="n">{r["waiting"]:,}</td><td class="n">{r["failing"]:,}</td></tr>'
        for r in rows
    )
    return (
        "<table><tr><th>queue</th><th>group</th><th class='n'>partitions</th><th class='n'>waiting</th>"
        "<th class='n'>to be retried</th></tr>" + body + "</table>"
    )


def _nothing(text: str) -> str:
    return f'<p class="nothing">{text}</p>'
