"""What commands are made of: an end in lines, and options that are the fields of a Struct.

A field says all there is to say of its option: `name: Annotated[TYPE, Doc(HELP), METAVAR] = DEFAULT`.
"""

from collections.abc import Callable
from inspect import Parameter, Signature
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import typer
import typer.core

from symbiosis.errors import SymbiosisError

Given = dict[str, object]  # the options that a command line has, by the names of fields


class InLines(typer.core.TyperCommand):
    """A command that ends with a line for each error of the user's. Any other exception is a bug, and shows its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SymbiosisError as error:
            for line in str(error).splitlines():
                typer.echo(f"error: {line}", err=True)
            raise typer.Exit(2) from None


class ServeCommand(InLines):
    """`symbiosis serve`, which takes several adapters behind one --lora-modules, as vLLM's users write them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread(args, "--lora-modules"))


def spread(words: list[str], option: str) -> list[str]:
    """Repeat an option before each of the values that follow it, NAME=VALUE or JSON.

    >>> spread(["--lora-modules", "a=x", "b=y", "demo"], "--lora-modules")
    ['--lora-modules', 'a=x', '--lora-modules', 'b=y', 'demo']
    """
    found: list[str] = []
    is_open = False
    for before, word in zip(["", *words], words, strict=False):
        is_value = is_open and before != option and not word.startswith("-") and ("=" in word or word.startswith("{"))
        is_open = word == option or before == option or is_value
        found += [option, word] if is_value else [word]
    return found


def takes(kind: type[msgspec.Struct], **more: Any) -> Callable[[Callable[[Given, Path | None], None]], Callable[..., None]]:  # fmt: skip
    """Make a command of a function: it is called with what the command line has given, and with the file of --config.

    Args:
        more: Other options, by their annotations, whose callbacks do all that they mean.
    """
    hints = {name: _on_command_line(name, hint) for name, hint in get_type_hints(kind, include_extras=True).items()}
    hints["config"] = Annotated[Path | None, typer.Option(help="YAML file with these options as keys.")]
    hints |= more

    def decorated(run: Callable[[Given, Path | None], None]) -> Callable[..., None]:
        def command(config: Path | None, **values: Any) -> None:
            run({name: value for name, value in values.items() if name not in more and value is not None}, config)

        command.__doc__, command.__annotations__ = run.__doc__, hints
        parameters = [Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=hint) for name, hint in hints.items()]  # fmt: skip
        setattr(command, "__signature__", Signature(parameters))
        return command

    return decorated


def _on_command_line(name: str, hint: Any) -> Any:
    """Return the annotation of a field as typer takes it. What is not given is None, and a value is checked when all are loaded."""
    field, doc, *metavar = get_args(hint)
    help_, word = doc.documentation, name.replace("_", "-")
    if name == "model":
        return Annotated[str | None, typer.Argument(metavar="MODEL", help=help_, show_default=False)]
    kinds = [each for each in get_args(field) or (field,) if each is not NoneType]
    if kinds == [bool]:
        return Annotated[bool | None, typer.Option(f"--{word}/--no-{word}", help=help_)]
    option = typer.Option(f"--{word}", help=help_, metavar=metavar[0] if metavar else None)
    if get_origin(field) is tuple and kinds[0] is not float:  # numbers stand in one word, with commas between them
        return Annotated[list[kinds[0]] | None, option]  # type: ignore[valid-type]
    return Annotated[(kinds[0] if kinds in ([int], [float]) else str) | None, option]  # type: ignore[valid-type]
