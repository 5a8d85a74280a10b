"""Help texts of commands: arguments as in `quire generate [OPTIONS] PROMPT`, switches without a type."""

from typing import Any

from typer.core import TyperCommand, TyperGroup, TyperOption


class QuireCommand(TyperCommand):
    """A command."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types_of_switches(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        # Typer writes {PROMPT}.
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]


class QuireGroup(TyperGroup):
    """`quire` itself."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types_of_switches(super().get_params(ctx))


def _without_types_of_switches(params: list[Any]) -> list[Any]:
    """The parameters of a command. Typer writes <bool> after a switch, as if it had a value."""
    for param in params:
        if isinstance(param, TyperOption) and param.is_bool_flag:
            param.metavar = ""
    return params
