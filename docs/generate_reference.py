"""The reference pages, from the program itself: `python docs/generate_reference.py`.

Invariant: the part of a page between its two markers is written by this script alone, and is
the same on every machine; everything outside the markers is written by people and left alone.
`tests/unit/test_docs.py` fails when a page is not what this script would write.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import typer

from millrace.cli.main import app
from millrace.errors import MillraceError

FOLDER = Path(__file__).resolve().parent / "reference"
BEGIN = "<!-- begin generated: python docs/generate_reference.py -->"
END = "<!-- end generated -->"

# Which errors a command of a page can end with; a page that is not here lists all of them, as
# exit-codes.md does.
CODES = {
    "clone.md": (2, 3, 4, 5, 6, 7, 70),
    "compare.md": (2, 5, 9, 70),
    "consolidate.md": (2, 3, 4, 5, 7, 9, 70),
    "list.md": (2, 4, 5, 70),
    "demo.md": (2, 3, 5, 7, 9, 70),
    "tube.md": (2, 3, 4, 5, 6, 8, 9, 70),
}
# Commands with nothing to tell.
WITHOUT_PAGE = ("version",)


def main() -> None:
    """Write every page again."""
    for path in pages():
        text = path.read_text(encoding="utf-8")
        if text != regenerated(path):
            path.write_text(regenerated(path), encoding="utf-8")
            sys.stdout.write(f"wrote {path.relative_to(FOLDER.parent)}\n")


def pages() -> list[Path]:
    """A page for each command or group of commands, and one for the exit codes."""
    names = [name for name in root_command().commands if name not in WITHOUT_PAGE]
    return [FOLDER / f"{name}.md" for name in (*names, "exit-codes")]


def regenerated(path: Path) -> str:
    """What the page should hold: its own words, with the generated part as it is today."""
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{path.name} has no markers: {BEGIN} and {END}")
    generated = "\n".join(_generated(path.name))
    return f"{before}{BEGIN}\n\n{generated}\n{END}{after}"


def root_command() -> Any:
    """The program as a tree of commands."""
    return typer.main.get_command(app)


def find_commands(name: str) -> dict[tuple[str, ...], Any]:
    """The command of this name, or all commands of the group of this name."""
    return dict(_commands_below((name,), root_command().commands[name]))


def _commands_below(names: tuple[str, ...], found: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Commands, with the groups that lead to them."""
    if not hasattr(found, "commands"):
        yield names, found
        return
    if found.invoke_without_command:
        yield names, found
    for below, command in found.commands.items():
        yield from _commands_below((*names, below), command)


def error_classes(cls: type[MillraceError] = MillraceError) -> Iterator[type[MillraceError]]:
    """Every error of the program, with the most general ones first."""
    for child in cls.__subclasses__():
        yield child
        yield from error_classes(child)


def _generated(page: str) -> Iterator[str]:
    if page == "exit-codes.md":
        yield from _code_table(None)
        return
    commands = find_commands(page.removesuffix(".md"))
    for names, command in commands.items():
        yield from _command(names, command, heading=len(commands) > 1)
    yield "## Exit codes"
    yield ""
    yield from _code_table(CODES.get(page))
    yield "All of them, and what a script can rely on: [exit codes](exit-codes.md)."
    yield ""


def _command(names: tuple[str, ...], command: Any, *, heading: bool) -> Iterator[str]:
    name = " ".join(("millrace", *names))
    if heading:
        yield from (f"## {name}", "")
    usage = " ".join((name, "[OPTIONS]", *(a.metavar or a.name for a in _arguments(command))))
    yield from ("```text", usage, "```", "")
    yield from (inspect.cleandoc(command.help or ""), "")
    panels: dict[str, list[Any]] = {}
    for option in command.params:
        if not getattr(option, "hidden", False) and option not in _arguments(command):
            panel = getattr(option, "rich_help_panel", None)
            title = f"Options: {panel.lower()}" if panel else "Options"
            panels.setdefault(title, []).append(option)
    level = "###" if heading else "##"
    for title, options in panels.items():
        yield from (f"{level} {title}", "")
        yield from ("| option | environment | default | |", "| --- | --- | --- | --- |")
        for option in options:
            yield _row(_names(option), _variable(option), _default(option), option.help or "")
        yield ""


def _arguments(command: Any) -> list[Any]:
    """What is given by place, not by name."""
    return [option for option in command.params if option.param_type_name == "argument"]


def _names(option: Any) -> str:
    value = _value(option)
    longest = [f"`{name}{value}`" for name in option.opts if name.startswith("--")]
    return ", ".join(longest + [f"`{name}`" for name in option.opts if not name.startswith("--")])


def _value(option: Any) -> str:
    """What stands after the name; nothing for a flag."""
    if option.is_flag or getattr(option, "count", False):
        return ""
    if isinstance(option.default, Enum):
        choices = "|".join(str(one.value) for one in type(option.default))
        return f" {option.metavar or choices}"
    kinds = {int: "N", float: "N", str: "TEXT"}
    # Without a default, the type that was declared.
    kind = option.type_descriptor.annotation if option.default is None else type(option.default)
    return f" {option.metavar or kinds.get(kind, 'PATH')}"


def _variable(option: Any) -> str:
    names = [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())
    return ", ".join(f"`{name}`" for name in names)


def _default(option: Any) -> str:
    default = option.default
    if option.is_flag or getattr(option, "count", False) or option.show_default is False:
        return ""
    if default is None or default in ("", [], ()):
        return ""
    if isinstance(option.show_default, str):
        return f"`{option.show_default}`"
    return f"`{default}`"


def _code_table(codes: tuple[int, ...] | None) -> Iterator[str]:
    yield from ("| code | error | meaning |", "| ---: | --- | --- |")
    yield _row("0", "", "Done.")
    for cls in sorted(error_classes(), key=lambda cls: cls.exit_code):
        is_named = codes is None or (cls.exit_code in codes and cls.__base__ is MillraceError)
        if is_named:
            meaning = inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]
            yield _row(str(cls.exit_code), f"`{cls.__name__}`", meaning)
    yield ""


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|").replace("\n", " ") for cell in cells) + " |"


if __name__ == "__main__":
    main()
