"""Does the queue slow down with size? `python -m bench.scale`, or `--only idle groups retained`.

Two engines run in processes of their own, each on a Postgres of its own: a small one, and one with 100,000
idle partitions, ten groups, or ten million messages retained. They are measured in turns, so that a busy
machine hurts both alike. What counts is processor time a message (the engine's process and its Postgres, with
all that runs in them meanwhile), because that does not depend on who else uses the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

TURNS = 4
IDLE_LANES = 100_000
RETAINED = 10_000_000
GROUPS = 10


class Case(NamedTuple):
    """What is measured, what the large side has more, and with which queue it is done."""

    name: str
    large: str
    works: tuple[tuple[str, int], ...]


CASES = {
    "idle": Case(
        f"{IDLE_LANES:,} idle partitions", "idle", (("pop", 1), ("pop", 100), ("cycle", 1), ("cycle", 100))
    ),
    "groups": Case(f"{GROUPS} groups", "groups", (("push", 1), ("push", 100))),
    "retained": Case(
        "{retained:,} messages retained",
        "retained",
        (("push", 1), ("push", 100), ("pop", 1), ("pop", 100), ("cycle", 100)),
    ),
}
COUNTS = {
    ("push", 1): 8_000,
    ("push", 100): 200_000,
    ("pop", 1): 8_000,
    ("pop", 100): 200_000,
    ("cycle", 1): 2_000,
    ("cycle", 100): 60_000,
}
WORDS = {
    "push": "push {}",
    "pop": "pop {} of any partition, auto-ack",
    "cycle": "push {0}, pop {0} of any partition, ack {0}",
}


class Side:
    """One engine in a process of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.scale_side"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, command: str, **arguments: Any) -> dict[str, float]:
        """Have something done and answer its figures."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{command} failed: its error is above")
        answer: dict[str, float] = json.loads(line)
        return answer

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(small: Side, large: Side, work: str, size: int, messages: float) -> tuple[str, ...]:
    """One line of the table: both sides in turns."""
    count = round(COUNTS[work, size] * messages)
    for side in (small, large):
        side(work, size=size, count=count // 2)  # warm
    turns: dict[Side, list[dict[str, float]]] = {small: [], large: []}
    for turn in range(TURNS):
        for side in (small, large) if turn % 2 == 0 else (large, small):
            turns[side].append(side(work, size=size, count=count))

    def middle(side: Side, figure: str) -> float:
        return statistics.median(row[figure] for row in turns[side])

    cpu = {side: middle(side, "server_us") + middle(side, "postgres_us") for side in turns}
    return (
        WORDS[work].format(size),
        *(f"{middle(side, 'server_us'):.1f} + {middle(side, 'postgres_us'):.1f}" for side in turns),
        f"{cpu[large] / cpu[small]:.2f}",
        *(f"{middle(side, 'rate'):,.0f}" for side in turns),
        f"{middle(large, 'rate') / middle(small, 'rate'):.2f}",
    )


def run(case: Case, messages: float, retained: int) -> Iterator[str]:
    """Run one case; answers lines of Markdown."""
    small, large = Side(), Side()
    try:
        for side in (small, large):
            side("open")
        filled = large("fill", kind=case.large, retained=retained)
        yield f"\n{case.name.format(retained=retained)} (made in {filled['seconds']:.0f} s)\n"
        yield "| | CPU a message, few: engine + Postgres, µs | many | ratio | msg/s, few | many | ratio |"
        yield "|---|---|---|---|---|---|---|"
        for work, size in case.works:
            yield f"| {' | '.join(measure(small, large, work, size, messages))} |"
        rest = [side("rest", seconds=30.0) for side in (small, large)]
        memory = [side("memory")["mib"] for side in (small, large)]
        share = ", ".join(f"{100 * row['server'] + 100 * row['postgres']:.1f} %" for row in rest)
        yield f"\nAt rest (few, many): {share} of a core."
        yield f"The engine's memory (few, many): {memory[0]:.0f}, {memory[1]:.0f} MiB."
        if case.large == "retained":
            again = large("reopen")
            yield (
                f"A new engine on it answered its first push, to one partition, after {again['one']:.2f} s, "
                f"and pushes to all {again['partitions']:.0f} at once after {again['all']:.2f} s "
                f"(for {again['cpu']:.2f} s of processor time)."
            )
    finally:
        small.close()
        large.close()


def main() -> None:
    """Run the cases and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--messages", type=float, default=1.0, help="so many times the usual number a turn")
    parser.add_argument("--retained", type=int, default=RETAINED)
    options = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}")
    for name in options.only:
        for line in run(CASES[name], options.messages, options.retained):
            print(line, flush=True)
    print(f"\nload average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
