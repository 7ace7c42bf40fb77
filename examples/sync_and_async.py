"""The same app has sync handlers, run in threads, and async ones, run as tasks; each with performers."""

import asyncio
import time

from settled import App

app = App("memory://")
handled: list[str] = []


def note(kind: str, number: int) -> None:
    handled.append(f"{kind}-{number}")
    if len(handled) == 16:
        app.stop()


@app.subscriber("numbers", group="sync", performers=4)
def slow_sync(number: int) -> None:
    time.sleep(0.1)
    note("sync", number)


@app.subscriber("numbers", group="async", performers=4)
async def slow_async(number: int) -> None:
    await asyncio.sleep(0.1)
    note("async", number)


if __name__ == "__main__":
    for n in range(8):
        app.publish("numbers", n)
    started = time.perf_counter()
    app.run()
    print(sorted(handled))
    print(f"16 handlers of 0.1 s took {time.perf_counter() - started:.1f} s")
