"""Options that say what a file of weights does not say itself."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mechinterp.checkpoints.foreign.options import Hints


def hints_of(
    task: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Fields of the task, for files that do not state it; else the softmax paper's.",
        ),
    ] = None,
    format: Annotated[
        str | None, typer.Option(metavar="NAME", help="The file's format, where it does not tell.")
    ] = None,
    d_x: Annotated[int | None, typer.Option(min=1, help="Dimension of a covariate.")] = None,
    d_y: Annotated[int | None, typer.Option(min=1, help="Number of responses.")] = None,
    n_heads: Annotated[
        int | None, typer.Option(min=1, help="Heads, for files that do not say.")
    ] = None,
    scale: Annotated[
        float | None, typer.Option(help="Factor on the scores, for files that do not say.")
    ] = None,
    attend_to_self: Annotated[
        bool | None,
        typer.Option(
            "--attend-to-self/--context-only", help="Whether the query is among its keys."
        ),
    ] = None,
    score: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Score function, for files that do not say: softmax, linear, linear/L, 1+tanh, 1+Cx, (1+Cx)^2.",
        ),
    ] = None,
    score_slope: Annotated[
        float | None, typer.Option(help="The constant C of the score; 1 if left out.")
    ] = None,
    columns: Annotated[
        str | None, typer.Option(metavar="x,y|y,x", help="Order of a token's columns.")
    ] = None,
    orientation: Annotated[
        str | None,
        typer.Option(
            metavar="out,in|in,out", help="Axes of matrices, for names that do not say: W x or x W."
        ),
    ] = None,
    sign: Annotated[
        str | None,
        typer.Option(metavar="plus|minus", help="Sign of the y entry in the prediction."),
    ] = None,
    output_column: Annotated[
        int | None,
        typer.Option(min=0, help="Entry of a layer's output that is the prediction, from 0."),
    ] = None,
    output_scale: Annotated[
        float | None, typer.Option(help="Factor on what attention adds, for files without it.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="How norms, MLPs and tokens are joined (norm=before, layout=in_turn); repeatable.",
        ),
    ] = None,
    map: Annotated[
        list[str] | None,
        typer.Option(
            metavar="THEIRS=KNOWN", help="A name as a known one (to_q=q_proj); repeatable."
        ),
    ] = None,
) -> "Hints":
    """What the options say of files that do not say it."""
    given = dict(locals())
    from mechinterp.checkpoints.foreign.options import Hints
    from mechinterp.checkpoints.io.atomic import read_task

    given["task"] = None if task is None else read_task(task)
    rows = [row.partition("=") for row in model or ()]
    flags = {"true": True, "false": False}
    given["model"] = {name: flags.get(value.lower(), value) for name, _, value in rows} or None
    return Hints(**given)
