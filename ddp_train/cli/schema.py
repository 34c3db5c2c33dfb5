"""`ddp-train schema FOLDER`: JSON schemas of the YAML files in conf/, by which an editor completes keys and marks mistakes."""

import dataclasses
import inspect
import json
import typing
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_type_hints

from ddp_train import CONF
from ddp_train.cli.help import options
from ddp_train.config.command.composition import parse
from ddp_train.config.schema import KEYS_BESIDE_ARGUMENTS, NAMED, SECTIONS, TARGETS, RootConfig, subsection
from ddp_train.config.targets.locate import look_up
from ddp_train.config.targets.target import AUTO, DIRECTIVES, hints_of, members_of
from ddp_train.errors import DONE, UserError
from ddp_train.launch.job_runner import JobRunner

USAGE = """ddp-train schema FOLDER     [--config-dir=FOLDER]

  FOLDER         folder for the JSON schemas: GROUP.json for each group of conf/, and config.json for whole configurations. Editors with the
                 YAML language server (VS Code's YAML extension, Neovim, ...) complete and check a YAML file that has the comment
                 `# yaml-language-server: $schema=FOLDER/GROUP.json`. `ddp-train init` writes both. Run it again when classes have changed.
"""

_Schema = dict[str, Any]
_INTERPOLATION: _Schema = {"type": "string", "pattern": r"\$\{|^\?\?\?$"}  # stands for a value of any type; ???: given elsewhere
_TYPES: dict[Any, str] = {int: "integer", float: "number", bool: "boolean", str: "string", type(None): "null"}
_TYPES |= {dict: "object", Mapping: "object", list: "array", tuple: "array", set: "array"}
_BOUNDS = {"min": "minimum", "above": "exclusiveMinimum"}
_NODE: _Schema = {"type": "object", "required": ["_target_"]}  # another component as an argument
_DIRECTIVES: _Schema = {name: {} for name in DIRECTIVES} | {"_target_": {"type": "string"}, "_partial_": {"type": "boolean"}}
_COMPOSED: _Schema = {"defaults": {"type": "array"}, "hydra": {"type": "object"}}  # Hydra's own keys


def write(arguments: list[str], runner: JobRunner) -> int:
    """`ddp-train schema FOLDER`: write the schemas of the groups of ddp_train, with what a project's own options name."""
    args = parse(arguments)
    if len(args.overrides) != 1:
        raise UserError(happened="no folder was given, or more than one", expected="where the schemas go", fix="ddp-train schema .schema")
    folder = Path(args.overrides[0])
    folder.mkdir(parents=True, exist_ok=True)
    for name, schema in schemas([CONF, *([Path(args.config_dir)] if args.config_dir is not None else [])]).items():
        (folder / f"{name}.json").write_text(json.dumps({"$schema": "http://json-schema.org/draft-07/schema#", **schema}, indent=1) + "\n")
    return DONE


def schemas(configurations: Sequence[Path]) -> dict[str, _Schema]:
    """Return the schema of each group of some folders of YAML by its name, and that of a whole configuration as `config`."""
    targets: dict[str, set[str]] = {}
    meanings: dict[str, str] = {}
    for option in (option for folder in configurations for option in options(folder)):
        targets.setdefault(option.group, set()).update(filter(None, [option.target]))
        meanings = {key.name: key.meaning for key in option.keys if key.meaning} | meanings
    sections = {name: _section(schema, f"{name}.", meanings) for name, schema in SECTIONS.items()}
    sections |= {name: _component(name, sorted(targets.get(name, ()))) for name in TARGETS}
    sections |= {name: _object({}, others=_object_or(_component(name, sorted(targets.get(name, ()))), {"type": "null"})) for name in NAMED}
    return {"config": _object({**_section(RootConfig, "", meanings)["properties"], **sections}), **sections}


def _section(schema: type, prefix: str, meanings: Mapping[str, str]) -> _Schema:
    """Return the schema of one of our own sections, whose keys begin with a prefix; their comments are what an editor shows of them."""
    hints = get_type_hints(schema)
    keys = {}
    for item in dataclasses.fields(schema):
        inner, rule = subsection(item), item.metadata
        if inner is not None:
            keys[item.name] = _object_or(_section(inner, f"{prefix}{item.name}.", meanings), _INTERPOLATION)
            continue
        value = {} if "parse" in rule else _value(hints[item.name])
        value |= {word: rule[name] for name, word in _BOUNDS.items() if name in rule}
        keys[item.name] = {"description": meanings.get(prefix + item.name, ""), **_either(value, _INTERPOLATION)}
    return _object(keys)


def _component(section: str, targets: Iterable[str]) -> _Schema:
    """Return the schema of a component: the arguments of the classes that options name; those of another class are not checked."""
    cases = []
    for target in targets:
        with suppress(Exception):  # a package that is not installed, or a module of the user's that raises
            is_target = {"properties": {"_target_": {"const": target}}, "required": ["_target_"]}
            cases.append({"if": is_target, "then": _arguments(section, target)})
    return {"type": "object", "properties": _DIRECTIVES, "allOf": cases}


def _arguments(section: str, target: str) -> _Schema:
    made = look_up(target)
    hints, parameters = hints_of(made), inspect.signature(made).parameters
    keys = {name: _either(_value(hints[name]), {"const": AUTO}, _NODE, _INTERPOLATION) if name in hints else {} for name in parameters}
    changes = {"eval": _object_or(_object(keys), {"type": "null"}, _INTERPOLATION)} if section == "data" else {}
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    framework: _Schema = {name: {} for name in KEYS_BESIDE_ARGUMENTS.get(section, ())}
    return _object({**_DIRECTIVES, **framework, **keys, **changes}, others=is_open)


def _object(keys: Mapping[str, _Schema], *, others: _Schema | bool = False) -> _Schema:
    return {"type": "object", "properties": {**_COMPOSED, **keys}, "additionalProperties": others}


def _object_or(schema: _Schema, *others: _Schema) -> _Schema:
    """Return a schema of an object or something else, by which a mistake in the object is marked at its own key."""
    return {"if": {"type": "object"}, "then": schema, "else": _either(*others)}


def _value(hint: Any) -> _Schema:
    """Return the schema of the values that fit a type hint; of a type that YAML does not have, of any value."""
    return _either(*map(_of_one, members_of(hint)))


def _of_one(member: Any) -> _Schema:
    origin = typing.get_origin(member) or member
    if origin is typing.Literal:
        return {"enum": [*typing.get_args(member)]}
    return {"type": _TYPES[origin]} if origin in _TYPES else {}


def _either(*kinds: _Schema) -> _Schema:
    """Return a schema that takes what one of some takes."""
    return {} if {} in kinds else kinds[0] if len(kinds) == 1 else {"anyOf": [*kinds]}
