"""A report's figures as one HTML file with drawings in it; it needs nothing from anywhere."""

from __future__ import annotations

import re
import shlex
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
NEXT = (
    " The commands, with <code>SETTLED_URL</code> set, show a letter and count all like it; without "
    "<code>--dry-run</code> those are sent again."
)
WORDS = {
    "acked": "acknowledged",
    "retried": "failed, and came again",
    "released": "given back unattempted",
    "dead": "dead letters",
    "p50": "half took no longer than this",
    "p90": "nine in ten took no longer",
    "p99": "99 in 100 took no longer",
}
"""What a colour stands for."""


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
        "BOOKS": _books(figures),
        "ALERTS": _alerts(figures["alerts"]),
        "THROUGHPUT": _stacked(figures["throughput"], times, width),
        "WIDTH": _span(width),
        "LATENCY": _lines(figures["latency"], times, width, "From push to settlement"),
        "IN_HAND": _lines(figures["in_hand"], times, width, "From claim to settlement"),
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
        "DEAD": _dead(figures["dead_letters"]["errors"], on_nats=bool(figures.get("streams"))),
        "NEXT": "" if figures.get("streams") else NEXT,
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
        ("waiting", waiting, f"over all groups, {_when(figures['lag_at'])}", "var(--ink)"),
    ]
    return _rate(figures) + "".join(
        f'<div class="tile"><b style="color:{colour}">{"?" if value is None else f"{value:,}"}</b>'
        f"<span>{name}</span><small>{escape('not known here' if value is None else note)}</small></div>"
        for name, value, note, colour in tiles
    )


def _rate(figures: dict[str, Any]) -> str:
    rate = figures.get("rate")
    if rate is None or figures["totals"]["acked"] is None or not rate["peak"]:
        return ""
    usual = rate["average"] or rate["peak"]
    over = f"from the first settlement to the last, {rate['seconds']:,.0f} s"
    if rate["average"] is None:
        over = "all within a second"
    elif rate["peak"] > usual:
        over += f"; at most {rate['peak']:,.0f}"
    return f'<div class="tile"><b>{usual:,.0f}</b><span>messages a second</span><small>{over}</small></div>'


def _books(figures: dict[str, Any]) -> str:
    """What was pushed beside what became of it."""
    books = figures.get("books", [])
    if not books:
        return ""
    names = ("pushed", "acked", "dead", "waiting", "failing", "removed", "lost")
    heads = ("pushed", "acknowledged", "dead", "waiting", "to be retried", "removed unread", "lost")
    rows = []
    for row in books:
        cells = [
            ("queue, group", f"{escape(row['queue'])}<br><small>{escape(row['consumer_group'])}</small>")
        ]
        cells += [
            (head, "?" if row[name] is None else f"{row[name]:,}")
            for name, head in zip(names, heads, strict=True)
        ]
        rows.append(cells)
    unsure = any(row["lost"] is None for row in books)
    note = (
        "<p>? where it cannot be told: messages were settled before the journal begins, the group began "
        "later or was moved, or dead letters were sent again.</p>" * unsure
    )
    return (
        "<section><h2>Reconciliation</h2><p>Pushed = acknowledged + dead + waiting + to be retried + removed "
        "unread; what is missing on the right is lost. Of a queue in use, both are read a moment apart."
        f"</p>{_table(rows, first_number=1)}{note}</section>"
    )


def _source(row: dict[str, Any]) -> str:
    return f"{escape(row['queue'])}<br><small>{escape(row['consumer_group'])}</small>"


def _table(rows: list[list[tuple[str, str]]], *, first_number: int = 99, last_number: int = 99) -> str:
    """A table; on a narrow screen each row becomes a card, so each cell knows the name of its column."""

    def kind(place: int) -> str:
        return ' class="n"' if first_number <= place <= last_number else ""

    head = "".join(f"<th{kind(i)}>{name}</th>" for i, (name, _) in enumerate(rows[0]))
    body = "".join(
        "<tr>"
        + "".join(f'<td{kind(i)} data-name="{name}">{cell}</td>' for i, (name, cell) in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _alerts(alerts: list[dict[str, Any]]) -> str:
    rows = []
    for alert in alerts:
        state, when = "quiet", "never"
        over = alert.get("minutes_over", 0)
        if over and not alert["fired"]:
            when = f"never; over the limit for {over} min at most"
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
        router = alert.get("router_alert")
        limit = f"{alert['threshold']:g}/min<br><small>for {alert['minutes']} min</small>"
        name = f"<b>{escape(alert['name'])}</b><br>{escape(alert['text'])}"
        if router:
            name += f"<br><small>{escape(router)} in the router's runbook</small>"
        mark = f'<i class="{state.replace(" ", "-")}">{state}</i>'
        rows.append(
            [("state", mark), ("rule", name), ("limit", limit), ("worst rate", rate), ("fired", escape(when))]
        )
    return _table(rows, first_number=2, last_number=3) if rows else _nothing("No rules.")


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
                at = f"{datetime.fromtimestamp(time, UTC):%H:%M:%S}"
                tip = f"{at}: {row[kind]:,} {WORDS[kind]}"  # type: ignore[index]
                bars.append(
                    f'<rect x="{_x(time, times) - thick / 2:.1f}" y="{high:.1f}" width="{thick:.1f}" '
                    f'height="{max(low - high, 0.6):.1f}" fill="{colour}"><title>{tip}</title></rect>'
                )
                base += value
    kinds = {kind: colour for kind, colour in COLOURS.items() if any(r[kind] for r in rows)}
    sums = ", ".join(f"{sum(r[kind] for r in rows):,} {WORDS[kind]}" for kind in kinds)
    best = max(rows, key=lambda r: sum(r[k] for k in COLOURS))
    said = (
        f"In all {sums}. Most in {_span(width)}: {sum(best[k] for k in COLOURS):,}, at {_clock(best['t'])}."
    )
    drawn = _frame(times, lines, top, "") + "".join(bars)
    return _svg("Messages settled, over time", said, drawn) + _legend(kinds)


def _lines(rows: list[dict[str, Any]], times: list[float], width: float, title: str) -> str:
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
            f"<title>{_clock(r['t'])}: {'all' if same else WORDS[name]}, {r[name]:.3g} s</title></circle>"
            for x, y, r in points
        ]
    if len(rows) <= FEW:
        drawn += [
            f'<text x="{_x(near[_key(r["t"], width)], times):.1f}" y="{_y(r["p99"], top) - 8:.1f}" '
            f'class="tick" text-anchor="middle">{r["p99"]:.3g} s</text>'
            for r in rows
        ]
    worst = max(rows, key=lambda r: r["p99"])
    said = (
        f"Half took at most {max(r['p50'] for r in rows):.3g} s, 99 in 100 at most {worst['p99']:.3g} s, at "
    )
    picture = _svg(title, f"{said}{_clock(worst['t'])}.", _frame(times, lines, top, " s") + "".join(drawn))
    return picture + _legend({"all took about this long": LINES["p50"]} if same else LINES)


def _clock(time: float) -> str:
    return f"{datetime.fromtimestamp(time, UTC):%H:%M:%S}"


def _svg(title: str, said: str, inner: str) -> str:
    """A drawing, with words for who cannot see it."""
    words = f"<title>{escape(title)}</title><desc>{escape(said)}</desc>"
    label = escape(f"{title}. {said}")
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'<div class="chart"><svg {size} role="img" aria-label="{label}">{words}{inner}</svg></div>'


def _legend(colours: dict[str, str]) -> str:
    return (
        '<p class="legend">'
        + "".join(
            f'<span><i style="background:{c}"></i>{WORDS.get(name, name)}</span>'
            for name, c in colours.items()
        )
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


def _dead(errors: list[dict[str, Any]], *, on_nats: bool) -> str:
    if not errors:
        return _nothing("No dead letters.")
    return _table(
        [
            [
                ("error", _error(e, on_nats=on_nats)),
                ("queue, group", _source(e)),
                ("count", f"{e['count']:,}"),
                ("attempts", str(e["attempts"])),
                ("last", escape(_when(e["last"]))),
            ]
            for e in errors
        ],
        first_number=2,
        last_number=3,
    )


def _error(e: dict[str, Any], *, on_nats: bool) -> str:
    """An error, the letters that have it, and the commands that go on from there."""
    ids = e.get("ids", [])
    parts = [f"<b>{escape(e['error'])}</b>", f"<small>for example: {escape(e['example'] or '')}</small>"]
    if ids:
        which = "letter" if len(ids) == 1 else "first and last letter"
        parts.append(f"<small>{which}: {', '.join(f'<code>{escape(one)}</code>' for one in ids)}</small>")
    look = "nats stream get SETTLED_DEAD_LETTERS" if on_nats else "settled dlq show"
    commands = [f"{look} {ids[-1]}"] if ids else []
    if not on_nats:
        chosen = ("--queue", e["queue"], "--group", e["consumer_group"], "--error", pattern_of(e["error"]))
        commands.append(shlex.join(["settled", "pipeline", "redrive", *chosen, "--dry-run"]))
    return "<br>".join([*parts, *(f"<code>{escape(command)}</code>" for command in commands)])


def pattern_of(error: str) -> str:
    r"""A regular expression for an error whose parts that differ were taken out.

    >>> print(pattern_of("bank # is away (code '…')"))
    bank .* is away \(code .*\)
    """
    texts = re.split("#|<id>|'…'", error)
    return ".*".join(re.sub(r"([][().*+?{}|^$\\])", r"\\\1", text) for text in texts)


def _lag(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return _nothing("No group has read yet.")
    return _table(
        [
            [
                ("queue", escape(r["queue"])),
                ("group", escape(r["consumer_group"])),
                ("partitions", str(r["partitions"])),
                ("waiting", f"{r['waiting']:,}"),
                ("to be retried", f"{r['failing']:,}"),
            ]
            for r in rows
        ],
        first_number=2,
    )


def _nothing(text: str) -> str:
    return f'<p class="nothing">{text}</p>'
