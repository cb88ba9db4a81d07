"""Lay out `--help`: commands and options in groups, examples last. Rich's takes as long to import as all the rest."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup


class HelpfulCommand(TyperCommand):
    """A command whose options stand under their `rich_help_panel`, and whose epilog holds examples."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_groups(formatter, _options(self, ctx))

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.strip().splitlines():  # as they are: they are to be copied
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")


class HelpfulGroup(TyperGroup):
    """A group whose commands stand under their `rich_help_panel`, each with its whole first sentence.

    Each is imported when it is asked for: to import and declare all takes a sixth of what `ckpt ls` does.
    """

    places: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """By the name of a command, the title that it stands under, and its module."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.places]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.places:
            for name in self.places:  # one of them is meant, and suggested
                self.get_command(ctx, name)
        elif cmd_name not in self.commands:
            title, module = self.places[cmd_name]
            self.commands[cmd_name] = _declared(cmd_name, title, importlib.import_module(module))
        return self.commands.get(cmd_name)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        _write_groups(formatter, _options(self, ctx))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            about = (command.help or "").partition("\n\n")[0].replace("\n", " ")
            groups.setdefault(command.rich_help_panel, []).append((name, about))
        width = max(len(name) for rows in groups.values() for name, _ in rows)
        _write_groups(
            formatter,
            {title: [(f"{name:{width}}", about) for name, about in rows] for title, rows in groups.items()},
        )


def _declared(name: str, title: str, module: Any) -> Any:
    """Let Typer declare one command: the function in its module of the same name."""
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    settings: dict[str, Any] = {"cls": HelpfulCommand, "rich_help_panel": title, "epilog": module.EXAMPLES}
    alone.command(name, **settings)(getattr(module, name))
    return typer.main.get_command(alone)


def _options(command: Any, ctx: Any) -> dict[str, list[tuple[str, str]]]:
    groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is not None:
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            groups.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(record)
    return groups


def _write_groups(formatter: Any, groups: dict[str, list[tuple[str, str]]]) -> None:
    for title, rows in groups.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)
