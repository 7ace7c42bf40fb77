"""Turn a handler off without a deployment."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeAlias, TypeVar

from settled.handlers.layers import Layer, wrap
from settled.signals import ConfigurationError, DontAck

H = TypeVar("H", bound=Callable[..., Any])
Flag: TypeAlias = bool | Callable[[], bool] | Callable[[], Awaitable[bool]]


class Features:
    """Flags by name. A handler may name one before it is defined; it must be there when the app starts.

    >>> features = Features(billing=True)
    >>> features["billing"] = lambda: False
    >>> "billing" in features, "biling" in features
    (True, False)
    """

    def __init__(self, **flags: Flag) -> None:
        self._flags: dict[str, Flag] = {}
        for name, flag in flags.items():
            self[name] = flag

    def __setitem__(self, name: str, flag: Flag) -> None:
        if not isinstance(flag, bool) and not callable(flag):
            raise ConfigurationError(f"feature {name!r}: must be a bool or a callable, got {flag!r}")
        self._flags[name] = flag

    def __getitem__(self, name: str) -> Flag:
        try:
            return self._flags[name]
        except KeyError:
            known = ", ".join(sorted(self._flags)) or "none"
            raise ConfigurationError(
                f"feature {name!r} is unknown; define it before the app starts: "
                f"features[{name!r}] = True (known: {known})"
            ) from None

    def __contains__(self, name: str) -> bool:
        return name in self._flags

    def items(self) -> Iterable[tuple[str, Flag]]:
        """All flags by name."""
        return list(self._flags.items())


features = Features()
"""The flags that `feature_switch("name")` looks up."""


def feature_switch(flag: str | Flag, *, dont_ack: bool = False) -> Callable[[H], H]:
    """Skip the handler while the flag is off.

    A skipped message is acknowledged; with `dont_ack` it stays on the channel until the flag is on again.
    The flag is a bool, a callable, an async callable (on an async handler), or a name in `features`.
    """
    if not isinstance(flag, (bool, str)) and not callable(flag):
        raise ConfigurationError(f"feature_switch: flag must be a bool, a callable or a name, got {flag!r}")
    shown = repr(flag) if isinstance(flag, (bool, str)) else getattr(flag, "__qualname__", repr(flag))

    def off(is_on: object) -> bool:
        if not isinstance(is_on, bool):
            raise ConfigurationError(f"feature_switch: flag {shown} must give True or False, got {is_on!r}")
        if not is_on and dont_ack:
            raise DontAck(f"feature {shown} is off")
        return not is_on

    def sync(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = features[flag] if isinstance(flag, str) else flag
        is_on = found() if callable(found) else found
        if inspect.isawaitable(is_on):
            if inspect.iscoroutine(is_on):
                is_on.close()
            raise ConfigurationError(f"feature_switch: flag {shown} is async, the handler is not")
        return None if off(is_on) else inner(*args, **kwargs)

    async def async_(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = features[flag] if isinstance(flag, str) else flag
        is_on = found() if callable(found) else found
        if inspect.isawaitable(is_on):
            is_on = await is_on
        return None if off(is_on) else await inner(*args, **kwargs)

    def check() -> None:
        if isinstance(flag, str):
            features[flag]

    def decorate(handler: H) -> H:
        if inspect.iscoroutinefunction(flag) and not inspect.iscoroutinefunction(handler):
            raise ConfigurationError(f"feature_switch: flag {shown} is async, the handler is not")
        named = flag if isinstance(flag, str) else ""
        layer = Layer("feature_switch", releases=dont_ack, check=check, feature=named)
        return wrap(handler, layer, sync, async_)

    return decorate
