"""Training state: everything that decides how a run goes on, saved so that any strategy at any world size continues it.

A recipe calls `find` before it loads anything, and keeps a `States` during its loop. The format is in
docs/state-format.md; what reads it needs neither a launcher nor the training libraries, so they are imported late.
"""

_PLACES = {"find": "resume", "States": "states"}
__all__ = list(_PLACES)


def __getattr__(name: str):
    import importlib

    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
