"""Flags and YAML files into a config dataclass.

Precedence: flag, then file, then default; environment variables are never read. Values are read by the *field's* type
and not by YAML's guess, so `1e-5` is a float, `1e1` is the int 10, `'False'` is false and a revision `0123456` stays
text. Whatever cannot be used is an error with its place; nothing is ignored.
"""

import ast
import dataclasses
import difflib
import inspect
import os
import re
import shlex
import sys
import textwrap
import types
import typing
from typing import Literal

import yaml

NoneType = type(None)

# --- reading values ---------------------------------------------------------------------------------------------------


def read_value(hint, raw: str | list | None):
    """Turn what stands in a file or on the command line into the type of a field.

    `raw` is the text of a scalar, a list of such texts, or None for YAML's null. Raises ValueError with what is
    expected.
    """
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if raw in (None, "None", "null") and NoneType in members:
            return None
        first_error = None
        # Text fits everything, so it is tried last: `int | str` reads 5 as a number.
        for member in sorted((m for m in members if m is not NoneType), key=lambda m: m is str):
            try:
                return read_value(member, raw)
            except ValueError as error:
                first_error = first_error or error
        raise ValueError(f"{first_error}{' or null' if NoneType in members else ''}")
    if origin is list:
        if not isinstance(raw, list):
            raise ValueError(f"a list is expected, as in [{raw}]")
        return [read_value(members[0], item) for item in raw]
    if hint is dict:
        if not isinstance(raw, dict):
            raise ValueError("`name: value` pairs are expected, as in [{path: a.jsonl}]")
        return raw
    if origin is Literal:
        if raw not in members:
            raise ValueError(f"one of {', '.join(members)} is expected{_nearest(raw, members)}")
        return raw
    if not isinstance(raw, str):
        raise ValueError(f"{_EXPECTED[hint]} is expected")
    if hint is str:
        return raw
    text = raw.strip().lower()
    try:
        if hint is bool:
            return {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}[text]
        if hint is float:
            return float(text)
        return int(text) if re.fullmatch(r"[+-]?[\d_]+", text) else _whole(float(text))
    except (KeyError, ValueError, OverflowError):
        raise ValueError(f"{_EXPECTED[hint]} is expected") from None


_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _whole(number: float) -> int:
    if number != int(number):
        raise ValueError
    return int(number)


def _nearest(word, names) -> str:
    matches = difflib.get_close_matches(str(word), list(names), n=2)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""


# --- files and flags --------------------------------------------------------------------------------------------------

COMMAND_LINE = "the command line"
_ELSEWHERE = {  # what people look for here, and where it is
    "gradient_accumulation_steps": "it is derived from global_batch_size, per_device_batch_size and the world size",
    **dict.fromkeys(
        ("mixed_precision", "bf16", "fp16"), "set mixed_precision in the Accelerate file given to accelerate launch"
    ),
    **dict.fromkeys(("config_file", "num_processes"), "it belongs to accelerate launch, before the script's name"),
}
_NO_SUCH_FLAG = "; --help lists all, and accelerate_configs/ holds the choices of how a run is distributed"
_COMMAND_LINE_ONLY = {
    "trust_remote_code": "files are passed around, so none may allow foreign code to run",
}


def parse(cls: type, argv: list[str] | None = None):
    """Build the config `cls` from flags and `--config` files, or print what is wrong with them and exit with code 2.

    Flags win over files, later ones over earlier ones, and files over defaults. Only rank 0 prints. With `argv` None
    the process's own arguments are read, among which an Accelerate file (`--config_file`) may stand: see
    `relaunch_with_config_file`.
    """
    try:
        if argv is None:
            argv = sys.argv[1:]
            relaunch_with_config_file(argv)
        return _parse(cls, argv)
    except ValueError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _parse(cls: type, argv: list[str]):
    hints = typing.get_type_hints(cls)
    hints = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    files, flags, wanted, problems = _read_flags(hints, argv)
    if "help" in wanted:
        _parser(cls, hints).print_help()
        sys.exit(0)
    found = []  # (field, raw value, place), weakest first
    for path in files:
        found += _read_file(hints, path, problems)
    found += flags

    values, places = {}, {}
    for name, raw, place in found:
        try:
            values[name] = read_value(hints[name], raw)
            places[name] = place
        except ValueError as error:
            shown = "null" if raw is None else repr(raw) if isinstance(raw, str) else raw
            problems.append(f"{place}: {name} is {shown}: {error}")
    if problems:
        raise ValueError("\n       ".join(problems))
    parser = _parser(cls, hints)
    if "print_config" in wanted:
        print(to_yaml({**{name: parser.get_default(name) for name in hints}, **values}), end="")
        sys.exit(0)
    missing = [f.name for f in dataclasses.fields(cls) if _is_required(f) and f.name not in values]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} must be given: as --{missing[0]} VALUE, or as a key of the --config file"
        )
    try:
        return cls(**{name: value for name, value in vars(parser.parse_object(values)).items() if name in hints})
    except ValueError as error:
        mentioned = [f"{name}: {place}" for name, place in places.items() if re.search(rf"\b{name}\b", str(error))]
        raise ValueError(f"{error}{' (' + ', '.join(mentioned) + ')' if mentioned else ''}") from None


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _read_flags(hints: dict, argv: list[str]):
    """Split arguments into config files, (field, raw, place) entries, what is to be printed, and problems.

    jsonargparse would let a file that stands after a flag win over it and knows neither `--use_peft` alone nor
    `--names a b`.
    """
    files, entries, wanted, problems = [], [], set(), []
    position = 0
    while position < len(argv):
        token = argv[position]
        position += 1
        if token in ("-h", "--help", "--print_config"):
            wanted.add("print_config" if token == "--print_config" else "help")
            continue
        if not token.startswith("--") or token == "--":
            problems.append(f"{COMMAND_LINE}: {token!r} belongs to no flag: write --name value")
            continue
        name, equals, text = token[2:].partition("=")
        given = [text] if equals else []
        # A list takes all words up to the next flag, everything else at most one; a value that begins with -- needs
        # the = form.
        is_list = name in hints and "list[" in str(hints[name])
        while position < len(argv) and not argv[position].startswith("--") and not equals and (is_list or not given):
            given.append(argv[position])
            position += 1
        if name == "config":
            files += given
            if not given:
                problems.append(f"{COMMAND_LINE}: --config needs a file")
        elif name not in hints:
            problems.append(f"{COMMAND_LINE}: unknown flag --{name}{_advice(name, hints)}")
        elif not given and hints[name] is bool:
            entries.append((name, "true", COMMAND_LINE))
        elif not given:
            problems.append(f"{COMMAND_LINE}: --{name} needs a value")
        elif is_list and given not in (["null"], ["None"]):
            bracketed = given[0].startswith("[")
            entries.append((name, _flow_list(" ".join(given)) if bracketed else given, COMMAND_LINE))
        else:
            entries.append((name, given[0], COMMAND_LINE))
    return files, entries, wanted, problems


def _flow_list(text: str) -> list | str:
    """`[a, b]` as typed in a YAML file; text that is not such a list comes back as it is, to be refused with its
    field's name."""
    try:
        return _raw(yaml.compose(text, Loader=yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def _advice(name: str, hints: dict) -> str:
    return f"; {_ELSEWHERE[name]}" if name in _ELSEWHERE else _nearest(name, hints) or _NO_SUCH_FLAG


def _read_file(hints: dict, path: str, problems: list[str]) -> list[tuple]:
    """Entries (field, raw, place) of a YAML file; unknown and double keys are added to `problems`."""
    try:
        with open(os.path.expanduser(path), encoding="utf-8-sig") as file:
            root = yaml.compose(file.read(), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # not every YAML error has a place
        place = f"{path}:{mark.line + 1}" if mark else path
        raise ValueError(f"{place}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"{path}:{root.start_mark.line + 1}: `name: value` lines are expected")
    keys = [str(key.value) for key, _ in root.value]
    if "compute_environment" in keys or "distributed_type" in keys:
        raise ValueError(f"--config {path} is an Accelerate file: give it to accelerate launch as --config_file {path}")
    entries, seen = [], set()
    for (key, node), name in zip(root.value, keys, strict=True):
        place = f"{path}:{key.start_mark.line + 1}"
        try:
            raw = _raw(node)
        except ValueError as error:
            problems.append(f"{path}: {name}: {error}")
            continue
        except RecursionError:
            problems.append(f"{place}: {name} holds an anchor that contains itself")
            continue
        if name not in hints:
            problems.append(f"{place}: unknown key {name}{_advice(name, hints)}")
        elif name in seen:
            problems.append(f"{place}: {name} stands in the file twice: remove one")
        elif name in _COMMAND_LINE_ONLY and str(raw).lower() not in ("false", "no", "off"):
            problems.append(f"{place}: {name} is {raw}: {_COMMAND_LINE_ONLY[name]}: give --{name} on the command line")
        else:
            entries.append((name, raw, place))
        seen.add(name)
    return entries


def _raw(node: yaml.Node) -> str | list | dict | None:
    """What is written, before YAML's own guess at the type: the field's type decides. Raises ValueError for a mapping
    with a key twice."""
    if isinstance(node, yaml.SequenceNode):
        return [_raw(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        pairs = [(str(key.value), _raw(value)) for key, value in node.value]
        for name, _ in pairs:
            if sum(name == other for other, _ in pairs) > 1:
                raise ValueError(f"line {node.start_mark.line + 1}: {name} stands in the same entry twice: remove one")
        return dict(pairs)
    return None if node.tag == "tag:yaml.org,2002:null" else node.value


def _parser(cls: type, hints: dict):
    """The jsonargparse parser of a config: help page and last word on types. Imported late: it takes half a second."""
    import argparse

    from jsonargparse import ArgumentParser, DefaultHelpFormatter

    class Formatter(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
        """Keeps the line breaks of the recipe's docstring."""

    documents = field_documents(cls)
    description = (sys.modules[cls.__module__].__doc__ or inspect.cleandoc(cls.__doc__)).strip()
    parser = ArgumentParser(description=description, formatter_class=Formatter, exit_on_error=False)
    parser.add_argument("--config", metavar="FILE", help="YAML file of `name: value` lines; flags win over it.")
    parser.add_argument("--print_config", action="store_true", help="Print the resulting config as YAML and exit.")
    own = {name: owner for owner in reversed(cls.__mro__) for name in owner.__dict__.get("__annotations__", {})}
    groups = {}
    for field in dataclasses.fields(cls):
        owner = own[field.name]
        if owner not in groups:
            groups[owner] = parser.add_argument_group(inspect.cleandoc(owner.__doc__).split("\n")[0].rstrip("."))
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        settings = {"required": True} if _is_required(field) else {"default": default}
        text = documents.get(field.name, "")
        groups[owner].add_argument(f"--{field.name}", type=hints[field.name], help=text, **settings)
    return parser


def field_documents(cls: type) -> dict[str, str]:
    """The sentence beneath each field, which Python itself throws away; read from the source, so no further package is
    needed."""
    documents = {}
    for owner in reversed(cls.__mro__[:-1]):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0].body
        except (OSError, TypeError):  # a class typed into an interactive session has no source
            continue
        for field, below in zip(body, body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                documents[field.target.id] = " ".join(str(below.value.value).split())
    return documents


# --- an Accelerate file among the script's own arguments --------------------------------------------------------------

_MARK = "ONELOOP_RELAUNCHED"  # set across the restart, so that it can happen only once
# What `accelerate launch` sets for a single process (accelerate 1.15, utils/launch.py,
# prepare_simple_launcher_cmd_env).
_SET_BY_LAUNCHER = ("ACCELERATE_", "OMP_NUM_THREADS", "KMP_AFFINITY", "KMP_BLOCKTIME")


def relaunch_with_config_file(argv: list[str]) -> None:
    """Start this script again under `accelerate launch` if `--config_file X` stands among its own arguments; else do
    nothing.

    `accelerate launch recipe.py --config_file X` and `python recipe.py --config_file X` are what people type; the
    first would start one plain process and leave X unread. The new process replaces this one. `--num_processes N` is
    passed on to the launcher. Raises ValueError with the right command when several processes run already: they cannot
    be replaced one by one.
    """
    options, rest, position = {}, [], 0
    while position < len(argv):
        name, equals, text = argv[position].partition("=")
        position += 1
        if name not in ("--config_file", "--num_processes"):
            rest.append(argv[position - 1])
        elif equals:
            options[name] = text
        elif position < len(argv):
            options[name] = argv[position]
            position += 1
        else:
            raise ValueError(f"{COMMAND_LINE}: {name} needs a value")
    was_relaunched = os.environ.pop(_MARK, None)
    if "--config_file" not in options:
        return
    path = os.path.expanduser(options["--config_file"])
    if not os.path.isfile(path):
        raise ValueError(f"--config_file {options['--config_file']}: no such file: name a file of accelerate_configs/")
    options["--config_file"] = path
    words = [word for option in options.items() for word in option] + [sys.argv[0], *rest]
    alone = os.environ.get("WORLD_SIZE", "1") == "1" and "LOCAL_RANK" not in os.environ
    if was_relaunched or not alone or not os.path.isfile(sys.argv[0]):
        raise ValueError(
            f"--config_file {path} stands after the script's name, where the processes already started "
            "cannot use it: run\n"
            f"       {shlex.join(['accelerate', 'launch', *words])}"
        )
    environment = dict(os.environ)
    # Both are there only if a launcher ran; a user's own OMP_NUM_THREADS for plain `python recipe.py` is kept.
    if "ACCELERATE_MIXED_PRECISION" in environment and "ACCELERATE_DYNAMO_BACKEND" in environment:
        environment = {name: value for name, value in environment.items() if not name.startswith(_SET_BY_LAUNCHER)}
    environment[_MARK] = "1"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, "-m", "accelerate.commands.launch", *words], environment)


def to_yaml(values: dict) -> str:
    """A config file's text that gives these values again."""
    values = dict(values)
    note = ""
    if values.get("trust_remote_code"):
        del values["trust_remote_code"]
        note = "# Run with --trust_remote_code, which no config file may switch on.\n"
    return note + yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000)
