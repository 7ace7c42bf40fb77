"""The message pump: one logic, a sync and an async driver."""

from settled.pump.loop import Counts, Status, Stopped
from settled.pump.proactor import Proactor
from settled.pump.reactor import Reactor

__all__ = ["Counts", "Proactor", "Reactor", "Status", "Stopped"]
