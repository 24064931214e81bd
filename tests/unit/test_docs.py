"""The pages say what the program does: generated parts are fresh, commands and links exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_TEST_FILE = re.compile(r"(?:tests/)?([\w/]+/test_\w+\.py)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
# Where one command of a shell line ends.
_END_OF_COMMAND = {"|", "||", "&&", ";", "&", ">", "2>", "<"}


def _load_generator() -> ModuleType:
    path = ROOT / "docs" / "generate_reference.py"
    spec = importlib.util.spec_from_file_location("generate_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generator = _load_generator()


def _shell_lines(text: str) -> Iterator[str]:
    """The lines a reader would type: of `sh` blocks all, of `console` blocks those after $."""
    for language, body in _FENCE.findall(text):
        lines = body.replace("\\\n", " ").splitlines()
        if language == "sh":
            yield from lines
        elif language == "console":
            yield from (line.removeprefix("$ ") for line in lines if line.startswith("$ "))


def _inline_code(text: str) -> Iterator[str]:
    yield from _CODE.findall(_FENCE.sub("", text))


def _commands(text: str) -> Iterator[list[str]]:
    """The words of every `millrace ...` in a page, without the program's name."""
    for line in _shell_lines(text):
        words = shlex.split(line, comments=True)
        for at, word in enumerate(words):
            if word == "millrace" or word.endswith("/millrace"):
                end = next((n for n in range(at, len(words)) if words[n] in _END_OF_COMMAND), None)
                yield words[at + 1 : end]
    for code in _inline_code(text):
        if code.startswith("millrace "):
            yield code.split()[1:]


def _problem(words: list[str]) -> str:
    """What is wrong with a command line; "" if the program would take it."""
    command: Any = generator.root_command()
    rest = list(words)
    while rest and not rest[0].startswith("-") and hasattr(command, "commands"):
        name = rest.pop(0)
        if name not in command.commands:
            return f"no command {name}"
        command = command.commands[name]
    known = {name for option in command.params for name in option.opts} | {"-h", "--help"}
    for word in rest:
        name = word.partition("=")[0]
        if word.startswith("-") and name not in known:
            return f"no option {name}"
    return ""


@pytest.mark.parametrize("page", generator.pages(), ids=lambda page: page.name)
def test_reference_page_is_what_the_program_says(page: Path) -> None:
    assert page.exists(), f"a command has no page: write {page.relative_to(ROOT)} with its markers"
    fresh = page.read_text(encoding="utf-8") == generator.regenerated(page)
    assert fresh, f"{page.relative_to(ROOT)} is stale: run python docs/generate_reference.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_line_in_a_page_is_one_the_program_takes(page: Path) -> None:
    found = [
        f"millrace {' '.join(words)}: {problem}"
        for words in _commands(page.read_text(encoding="utf-8"))
        if (problem := _problem(words))
    ]
    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    named = {
        match
        for code in _inline_code(page.read_text(encoding="utf-8"))
        for match in _TEST_FILE.findall(code)
    }
    assert {name for name in named if not (ROOT / "tests" / name).exists()} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_between_pages_leads_somewhere(page: Path) -> None:
    broken = []
    for link in _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            broken.append(f"{link}: no such file")
        elif anchor and anchor not in _anchors(target):
            broken.append(f"{link}: no such heading")
    assert broken == []


def _anchors(page: Path) -> set[str]:
    """Headings as anchors, the way GitHub makes them."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in _HEADING.findall(text)
    }


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("millrace clone --source a --target b", ""),
        ("millrace list table-parts --split-tables-larger-than=1GB -h", ""),
        ("millrace clone --no-such-option", "no option --no-such-option"),
        ("millrace close", "no command close"),
        ("millrace list tables --target b", "no option --target"),
    ],
)
def test_wrong_command_lines_are_found(line: str, problem: str) -> None:
    assert [_problem(words) for words in _commands(f"```sh\n{line}\n```\n")] == [problem]


def test_commands_are_found_in_prompts_pipes_and_prose() -> None:
    text = (
        "Run `millrace demo --keep` first.\n\n"
        "```console\n$ export A=1; .venv/bin/millrace clone \\\n    --json | head -n 1\n"
        "millrace: 1 problem found\n```\n"
        "```text\nmillrace copy 5 of 7\n```\n"
    )
    assert list(_commands(text)) == [["clone", "--json"], ["demo", "--keep"]]
