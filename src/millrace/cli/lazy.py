"""Commands whose modules are imported when they are used.

Invariant: the list of commands and their summaries is shown without importing any of them; what
runs a command, or asks for its options, gets the real one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from functools import cache
from importlib import import_module
from typing import Any, ClassVar, NamedTuple, cast

import typer
from typer.core import TyperCommand, TyperGroup

from millrace.cli.habits import add_habits

# Of every command.
HELP_OPTIONS = ["-h", "--help"]


class Place(NamedTuple):
    """Where a command is, and the first line of its help."""

    module: str
    # A function with its options as annotated parameters, or a Typer with further commands.
    attribute: str
    summary: str
    # The job it belongs to: the heading it stands under in the list of commands.
    job: str


class LazyGroup(TyperGroup):
    """A group of the commands that a subclass names."""

    places: ClassVar[dict[str, Place]] = {}

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = cast(Any, _Commands(self.places, self.rich_markup_mode))

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        outline = copy(self)
        outline.commands = {
            name: TyperCommand(name, help=place.summary, rich_help_panel=place.job)
            for name, place in self.places.items()
        }
        _name_no_type_of_flags(outline)
        super(LazyGroup, outline).format_help(ctx, formatter)


class _Commands(Mapping[str, Any]):
    def __init__(self, places: dict[str, Place], markup: Any) -> None:
        self._places = places
        self._markup = markup

    def __getitem__(self, name: str) -> Any:
        return _load(name, self._places[name], self._markup)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


@cache
def _load(name: str, place: Place, markup: Any) -> Any:
    found = getattr(import_module(place.module), place.attribute)
    parent = typer.Typer(rich_markup_mode=markup)
    if isinstance(found, typer.Typer):
        parent.add_typer(found, name=name)
    else:
        parent.command(name)(found)
    command = typer.main.get_group(parent).commands[name]
    add_habits(command, name)
    _name_no_type_of_flags(command)
    return command


def _name_no_type_of_flags(command: Any) -> None:
    """Help would show `<bool>` behind options that take no value."""
    for child in getattr(command, "commands", {}).values():
        _name_no_type_of_flags(child)
    for option in command.get_params(typer.Context(command, help_option_names=HELP_OPTIONS)):
        if getattr(option, "is_flag", False) and option.metavar is None:
            option.metavar = ""
