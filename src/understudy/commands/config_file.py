"""A file of options: the long names of a command's options as keys, in YAML, TOML or JSON."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from understudy.errors import ConfigError


class StrictParser(argparse.ArgumentParser):
    """A parser that raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong as every other mistake in a configuration is said."""
        raise ConfigError(f"The configuration: {message}.", "See --help for the options.")


def with_file(path: Path, written: list[str], declare: Callable[[argparse.ArgumentParser], None]) -> argparse.Namespace:
    """The options of a file and those that were written on the command line, which win.

    `declare` adds a command's options to a parser. Each key of the file is one of them, `model` its positional one.
    """
    parser = StrictParser(add_help=False, allow_abbrev=False)
    declare(parser)
    values = read_config(path)
    model = values.pop("model", None)
    if model is not None and not isinstance(model, str):
        raise ConfigError(f"{path}: model is {model!r}.", "Give a text.")
    options = {action.option_strings[0]: action for action in parser._actions if action.option_strings}
    tokens: list[str] = []
    for name, value in values.items():
        option = f"--{name.replace('_', '-')}"
        if option not in options or option == "--config":
            known = ", ".join(sorted(key.removeprefix("--") for key in options if key != "--config"))
            raise ConfigError(f"{path}: there is no option named {name!r}.", f"Choose from model, {known}.")
        tokens += _tokens(path, option, options[option], value)
    merged = parser.parse_args([*tokens, *written])
    if merged.model is None:
        merged.model = model
    return merged


def read_config(path: Path) -> dict[str, Any]:
    """The mapping that a file holds; its ending says how it is written."""
    try:
        text = path.read_text(encoding="utf-8")
        values = _parse(path.suffix.lower(), text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:  # each of the three formats raises a kind of it
        raise ConfigError(f"{path} cannot be understood: {error}.") from None
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ConfigError(f"{path} holds no options.", "Write `name: value` lines, or their like in TOML or JSON.")
    return values


def _parse(suffix: str, text: str) -> object:
    if suffix == ".toml":
        return tomllib.loads(text)
    if suffix == ".json":
        return json.loads(text)
    if suffix in (".yaml", ".yml"):
        import yaml

        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(" ".join(str(error).split())) from None
    raise ValueError("its name must end in .yaml, .yml, .toml or .json")


def _tokens(path: Path, option: str, action: argparse.Action, value: object) -> list[str]:
    """An option as it would be written on the command line."""
    if value is None:
        return []
    is_flag = action.nargs == 0
    if is_flag != isinstance(value, bool):
        raise ConfigError(f"{path}: {option[2:]} is {value!r}.", f"Give {'true or false' if is_flag else 'a value'}.")
    if isinstance(value, bool):
        off = f"--no-{option[2:]}"
        return [option] if value else [off] if off in action.option_strings else []
    if isinstance(value, list):
        value = ",".join(str(entry) for entry in value)
    elif isinstance(value, dict):
        value = json.dumps(value)
    return [f"{option}={value}"]
