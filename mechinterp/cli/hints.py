"""Options that say what a file of weights does not say itself."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mechinterp.checkpoints.foreign.options import Hints

TaskOption = Annotated[
    Path | None,
    typer.Option(
        "--task",
        metavar="FILE.json",
        help="Fields of the task, for files that do not state it; else the softmax paper's.",
    ),
]
FormatOption = Annotated[
    str | None,
    typer.Option("--format", metavar="NAME", help="The file's format, where it does not tell."),
]
XOption = Annotated[int | None, typer.Option("--d-x", min=1, help="Dimension of a covariate.")]
YOption = Annotated[int | None, typer.Option("--d-y", min=1, help="Number of responses.")]
HeadsOption = Annotated[
    int | None, typer.Option("--n-heads", min=1, help="Heads, for files that do not say.")
]
ScaleOption = Annotated[
    float | None, typer.Option("--scale", help="Factor on the scores, for files that do not say.")
]
SelfOption = Annotated[
    bool | None,
    typer.Option("--attend-to-self/--context-only", help="Whether the query is among its keys."),
]
ScoreOption = Annotated[
    str | None,
    typer.Option(
        "--score",
        metavar="NAME",
        help="Score function, for files that do not say: softmax, linear, linear/L, 1+tanh, 1+Cx, (1+Cx)^2.",
    ),
]
SlopeOption = Annotated[
    float | None, typer.Option("--score-slope", help="The constant C of the score; 1 if left out.")
]
ColumnsOption = Annotated[
    str | None, typer.Option("--columns", metavar="x,y|y,x", help="Order of a token's columns.")
]
OrientationOption = Annotated[
    str | None,
    typer.Option(
        "--orientation",
        metavar="out,in|in,out",
        help="Axes of matrices, for names that do not say: W x or x W.",
    ),
]
SignOption = Annotated[
    str | None,
    typer.Option("--sign", metavar="plus|minus", help="Sign of the y entry in the prediction."),
]
OutputColumnOption = Annotated[
    int | None,
    typer.Option(
        "--output-column", min=0, help="Entry of a layer's output that is the prediction, from 0."
    ),
]
OutputOption = Annotated[
    float | None,
    typer.Option("--output-scale", help="Factor on what attention adds, for files without it."),
]
ModelOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="NAME=VALUE",
        help="How norms, MLPs and tokens are joined (norm=before, layout=in_turn); repeatable.",
    ),
]
MapOption = Annotated[
    list[str] | None,
    typer.Option(
        "--map", metavar="THEIRS=KNOWN", help="A name as a known one (to_q=q_proj); repeatable."
    ),
]


def hints_of(
    task: TaskOption = None,
    format: FormatOption = None,
    d_x: XOption = None,
    d_y: YOption = None,
    n_heads: HeadsOption = None,
    scale: ScaleOption = None,
    attend_to_self: SelfOption = None,
    score: ScoreOption = None,
    score_slope: SlopeOption = None,
    columns: ColumnsOption = None,
    orientation: OrientationOption = None,
    sign: SignOption = None,
    output_column: OutputColumnOption = None,
    output_scale: OutputOption = None,
    model: ModelOption = None,
    map: MapOption = None,
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
