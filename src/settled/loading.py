"""Find an app by `module:name`, and say in one line what is wrong if it is not there."""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
from pathlib import Path

from settled.app import App


class CannotLoad(Exception):
    """There is no app where it was said to be."""


def load(target: str) -> App:
    """The app that `module:name` names, imported from the current directory or the path."""
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise CannotLoad(f"{target!r} does not name an app; write module:app, for example shop.orders:app")
    if module_name.endswith(".py") or "/" in module_name or module_name.startswith("."):
        dotted = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise CannotLoad(f"{module_name!r} is no module's name; write {dotted}:{name}, where that is found")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise CannotLoad(f"no module {module_name!r} in {here} or on the path") from error
        raise CannotLoad(f"{module_name} needs {error.name!r}, which is not installed") from error
    except Exception as error:
        raise CannotLoad(f"{module_name} cannot be imported: {_in_one_line(error)}") from error
    try:
        found = getattr(module, name)
    except AttributeError:
        apps = [key for key, value in vars(module).items() if isinstance(value, App)]
        close = difflib.get_close_matches(name, vars(module), n=1)
        hint = f"; did you mean {module_name}:{(apps or close)[0]}?" if apps or close else ""
        raise CannotLoad(f"{module_name} has no {name!r}{hint}") from None
    if not isinstance(found, App):
        raise CannotLoad(f"{target} is a {type(found).__name__}, not a settled.App")
    return found


def _in_one_line(error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({Path(error.filename or '').name}:{error.lineno})"
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({Path(last[0].filename).name}:{last[0].lineno})" if last else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"
