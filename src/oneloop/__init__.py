"""One training loop, any strategy, the same numbers.

A recipe names all its parts in one line (`from oneloop import config, data, launch`), and its `--help` still answers
in well under a second: a submodule named that way is imported when one of its attributes is first used. `import
oneloop.launch` and `from oneloop.launch import x` import at once, as everywhere else.
"""

import importlib
import pkgutil
import types

__version__ = "0.1.0"


class _Deferred(types.ModuleType):
    """Stands for a submodule until its first use.

    Why not `importlib.util.LazyLoader`: that one puts half-made modules into `sys.modules`, and everything that walks
    there (`inspect`, debuggers, torch itself) would load them all. This one is only an attribute of the package; the
    import system replaces it by the real module as soon as that is imported.
    """

    def __getattr__(self, name):
        return getattr(importlib.import_module(self.__name__), name)

    @property
    def __dict__(self):
        # What looks a name up here, as pytest's monkeypatch does before it restores it, must find the real one.
        return importlib.import_module(self.__name__).__dict__

    def __setattr__(self, name, value):
        setattr(importlib.import_module(self.__name__), name, value)

    def __delattr__(self, name):
        delattr(importlib.import_module(self.__name__), name)

    def __dir__(self):
        return dir(importlib.import_module(self.__name__))


def defer_submodules(package: str, path, namespace: dict) -> None:
    """Put a stand-in for each submodule of a package into the package's namespace."""
    for submodule in pkgutil.iter_modules(path):
        namespace[submodule.name] = _Deferred(f"{package}.{submodule.name}")


defer_submodules(__name__, __path__, globals())
