"""Commands that run one analysis of one model, made from the table options.json: argument parsing only.

The table has the options of every analysis of the registry, so that `mechinterp --help` loads no analysis. `python -m
tests.cli.test_analysis_commands` writes it from the signatures."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mechinterp.cli.files import Files
from mechinterp.cli.options import (
    PathArgument,
    Request,
    add_command,
    argument,
    keyword,
    new_app,
    option,
    reads_files,
)
from mechinterp.cli.own_model import require_model
from mechinterp.cli.printing import about_paths, say, say_json, say_of
from mechinterp.cli.table import TYPES, Row

if TYPE_CHECKING:
    from mechinterp.analysis.result import Finding

OPTION_TABLE: list[Row] = json.loads(
    Path(__file__).with_name("options.json").read_text(encoding="utf-8")
)
"""Name, description and options of each analysis of the registry, in its order."""
OverStepsOption = Annotated[
    bool,
    option("--over-steps", "Run it at every saved step of the training of a checkpoint or run."),
]


def commands() -> list[Callable[..., None]]:
    """Commands of the analyses in the order of the registry, without `classify`, which has a command for many models."""
    return [command_of(row) for row in OPTION_TABLE if row["name"] != "classify"]


def command_of(row: Mapping[str, Any]) -> Callable[..., None]:
    """Command that runs an analysis, with an option for each of its arguments.

    Args:
        row: Row of the table.
    """

    def run(
        *, path: Path, over_steps: bool, request: Request, files: Files, **given: object
    ) -> None:
        settings: dict[str, Any] = {}
        for each in row["options"]:
            if (value := given[each["name"]]) not in (None, [], ()):
                within = settings.setdefault(each["of"], {}) if "of" in each else settings
                within[each["name"]] = value
        show(row["named"], path, request, files, settings, over_steps=over_steps)

    own = [keyword("path", PathArgument, Parameter.empty)]
    own += [_parameter(each) for each in row["options"]]
    own += [keyword("over_steps", OverStepsOption, default=False)]
    own += [keyword(name, object) for name in ("request", "files")]
    run.__signature__ = Signature(own)  # type: ignore[attr-defined]
    run.__name__ = row["name"].replace("-", "_")
    run.__doc__ = f"{row['text']} Example: mechinterp {row['name']} MODEL"
    return reads_files(device=True, request=True)(run)


def _parameter(each: Mapping[str, Any]) -> Parameter:
    """Option of a command for one argument of an analysis; None if it is not given."""
    kind, flag = TYPES[each["type"]], f"--{each['name'].replace('_', '-')}"
    if kind is bool:
        flag = f"{flag}/--no-{flag[2:]}"
    typed = list[kind] if each.get("several") else kind  # type: ignore[valid-type]
    return keyword(each["name"], Annotated[typed | None, typer.Option(flag, help=each["help"])])


def analyse(
    context: typer.Context,
    name: Annotated[
        str, argument("NAME", "An analysis, or my_module:my_function; an unknown name lists all.")
    ],
    words: Annotated[
        list[str] | None,
        argument(
            "MODEL [OPTION]...",
            "Model and options; mechinterp analyse NAME --help lists the options.",
        ),
    ] = None,
) -> None:
    """Run one analysis by its name, or a function of your own. Example: mechinterp analyse my_module:my_function MODEL --json"""
    if name in context.parent.help_option_names:  # type: ignore[union-attr]
        return say(context.get_help())
    row = next((each for each in OPTION_TABLE if each["name"] == name.replace("_", "-")), None)
    if row is None:
        from mechinterp.analysis.registry import analysis_of
        from mechinterp.cli.table import row_of

        row = row_of(analysis_of(name)[1], name)
    app = new_app()
    add_command(app, command_of(row))
    app(words or (), standalone_mode=False, prog_name=f"mechinterp analyse {name}")


def show(
    name: str,
    path: Path,
    request: Request,
    files: Files,
    settings: Mapping[str, object],
    *,
    over_steps: bool,
) -> None:
    """Print the result of an analysis of a checkpoint.

    Args:
        settings: Further arguments of this analysis; errors may begin with a path among them.
        over_steps: True: at every kept step.
    """
    from mechinterp.analysis.over_steps import over_steps as at_every_step
    from mechinterp.analysis.registry import analysis_of, run_analysis
    from mechinterp.checkpoints.foreign.readings.agreed import Labelled, readings_note
    from mechinterp.models.run.predictor import is_learner
    from mechinterp.report.bars import progress_bars
    from mechinterp.report.to_json import to_json
    from mechinterp.report.to_text import to_text

    title, analysis = analysis_of(name)
    settings = dict(settings)
    if request.context_lengths and "context_lengths" in analysis.options:
        settings["context_lengths"] = request.context_lengths
        request = replace(request, context_lengths=None)
    named = [value for value in settings.values() if isinstance(value, Path)]
    with about_paths(path, *request.files, *named), progress_bars(quiet=request.quiet):
        model = files.source(path, request.context_length)
        law = files.law or (files.hints.task if is_learner(model) else None)
        if over_steps:
            heads = require_model(path, model)
            result: Finding = at_every_step(heads, name, task=law, **request.drawn_by | settings)
        else:
            result = run_analysis(name, model, task=law, **request.drawn_by, settings=settings)
    if request.as_json:
        say_json(to_json(title, model, result) | request.note)
        return
    text = to_text(title, result, wide=request.wide)
    # First why the file may have been read wrongly, and whose reading the numbers are; a label has the readings in its reason.
    note = "" if isinstance(result, Labelled) else readings_note(model)
    say_of(path, "\n".join(filter(None, (getattr(model, "doubt", ""), note, text))))
