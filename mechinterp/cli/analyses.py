"""Commands that run one analysis of one model, with options made from the arguments of its function, or score a method on
models with known answers: argument parsing only."""

from argparse import SUPPRESS, ArgumentError, ArgumentParser, BooleanOptionalAction
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import Parameter
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Literal, get_args, get_origin, get_type_hints

from mechinterp.cli.options import (
    Files,
    JsonOption,
    PathArgument,
    QuietOption,
    Request,
    argument,
    option,
    reads_files,
)
from mechinterp.cli.printing import (
    about_paths,
    answer,
    say_json,
    say_of,
)

if TYPE_CHECKING:
    from mechinterp.analysis.registry import Analysis
    from mechinterp.analysis.result import Finding

SHARED = ("n_prompts", "seed", "context_length")
"""Arguments of all analyses that are options of the command itself."""
PLAIN = (int, float, str)


def command_of(name: str, text: str) -> Callable[..., None]:
    """Command that runs the analysis of this name, with this help."""

    def run(path: PathArgument, *, request: Request, files: Files) -> None:
        show(name, path, request, files)

    run.__name__, run.__doc__ = name.replace("-", "_"), text
    return reads_files(device=True, request=True)(run)


ablate = command_of(
    "ablate",
    "Mask every head alone, every layer, and every subset of the heads of one layer. Example: mechinterp ablate checkpoints/softmax-h2-s0",
)
probe = command_of(
    "probe",
    "Show what each layer has computed, by linear probes. Example: mechinterp probe MODEL",
)
compare_learners = command_of(
    "compare-learners",
    "Compare the model with simple learners. Example: mechinterp compare-learners checkpoints/softmax-h2-s0",
)
response = command_of(
    "response",
    "Measure what the model does with a prompt, without a label. Example: mechinterp response MODEL",
)


@reads_files(device=True, request=True)
def prune(
    path: PathArgument,
    rule: Annotated[
        Literal["best-later", "least-later", "best-first"], option("--rule", "Heads to keep.")
    ] = "best-later",
    refit: Annotated[
        bool, option("--refit", "Also with a new read-out, fitted to the pruned model.")
    ] = False,
    out: Annotated[Path | None, option("--out", "New folder for the pruned model.")] = None,
    *,
    request: Request,
    files: Files,
) -> None:
    """Keep the first layer and the best head of later ones. Example: mechinterp prune MODEL --out
    pruned"""
    settings = {"rule": rule, "refit": refit, "out": out}
    show("prune", path, request, files, settings)


@reads_files(device=True, request=True)
def analyse(
    name: Annotated[
        str,
        argument(
            "NAME",
            "An analysis, or my_module:my_function; an unknown name lists all, an unknown option lists the options.",
        ),
    ],
    path: PathArgument,
    steps: Annotated[
        bool,
        option(
            "--over-steps", "Run it at every saved step of the training of a checkpoint or run."
        ),
    ] = False,
    further: Annotated[
        list[str] | None, argument("[--OPTION VALUE]...", "Further options of this analysis.")
    ] = None,
    *,
    request: Request,
    files: Files,
) -> None:
    """Run one analysis by its name. Example: mechinterp analyse p-probe
    checkpoints/sparse-h4-noise0.1-s0 --steps 20"""
    from mechinterp.analysis.registry import analysis_of

    settings = settings_of(*analysis_of(name), further or ())
    show(name, path, request, files, settings, steps=steps)


def show(
    name: str,
    path: Path,
    request: Request,
    files: Files,
    settings: Mapping[str, object] | None = None,
    *,
    steps: bool = False,
) -> None:
    """Print the result of an analysis of a checkpoint.

    Args:
        settings: Further arguments of this analysis; errors may begin with a path among them.
        steps: True: at every kept step.
    """
    from mechinterp.analysis.over_steps import over_steps
    from mechinterp.analysis.registry import analysis_of, run_analysis
    from mechinterp.report.bars import progress_bars
    from mechinterp.report.to_json import to_json
    from mechinterp.report.to_text import to_text

    title, analysis = analysis_of(name)
    settings = dict(settings or {})
    if request.context_lengths and "context_lengths" in analysis.options:
        settings["context_lengths"] = request.context_lengths
        request = replace(request, context_lengths=None)
    named = [value for value in settings.values() if isinstance(value, Path)]
    with about_paths(path, *request.files, *named), progress_bars(quiet=request.quiet):
        checkpoint = files.load(path, request.context_length)
        if steps:
            result: Finding = over_steps(
                checkpoint, name, task=files.law, **request.drawn_by | settings
            )
        else:
            result = run_analysis(
                name, checkpoint, task=files.law, **request.drawn_by, settings=settings
            )
    if request.as_json:
        say_json(to_json(title, checkpoint, result) | request.note)
        return
    text = to_text(title, result, wide=request.wide)
    # First a line on why the file may have been read wrongly, if there is a reason.
    say_of(path, f"{checkpoint.doubt}\n{text}" if checkpoint.doubt else text)


def score(
    method: Annotated[str, argument("MODULE:FUNCTION", "Function of an entry of the suite.")],
    version: Annotated[int, option("--version", "Version of the suite.")] = 1,
    trained: Annotated[
        str, option("--trained", "Trained models: bundled, all (in a clone) or none.")
    ] = "bundled",
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Score a method on models with known answers. Example: mechinterp score my_module:my_method"""
    from mechinterp.analysis.registry import own_function
    from mechinterp.analysis.result import records
    from mechinterp.known.entries import suite
    from mechinterp.known.scores import score as score_method
    from mechinterp.report.bars import progress_bars
    from mechinterp.report.text import frame_text, wrapped
    from mechinterp.report.to_json import SCHEMA_VERSION

    entries = suite(version, trained=trained)
    with progress_bars(quiet=quiet):
        found = score_method(own_function(method), entries)
    summary = found.summary()
    document = {
        "schema_version": SCHEMA_VERSION,
        "method": method,
        "suite": {"version": entries.version, "sha256": entries.hash, "entries": len(entries)},
        "scores": records(summary),
        "entries": records(found.to_frame()),
    }
    title = f"{method} on {len(found.seconds)} entries of the suite, version {version}"
    text = "\n".join([wrapped(title), frame_text(summary.drop(columns="meaning"), {})])
    answer(document, text, as_json=as_json)


def settings_of(name: str, analysis: "Analysis", words: Sequence[str]) -> dict[str, object]:
    """Further arguments of an analysis, from the words after its shared options on the command
    line.

    A truth value is `--mlps` or `--no-mlps`; an option with several values is repeated.

    Raises:
        ValueError: If there is no such option, or its value has the wrong type.
    Example:
        >>> from mechinterp.analysis.registry import ANALYSES
        >>> settings_of("p-probe", ANALYSES["p-probe"], ["--layer", "1", "--steps=3"])
        {'layer': 1, 'steps': 3}
    """
    hints = get_type_hints(analysis.function)
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    flags = []
    for key, parameter in analysis.options.items():
        kind = _kind(hints.get(key), parameter)
        if key in SHARED or kind is None:
            continue
        flags.append(f"--{key.replace('_', '-')}")
        if kind is bool:
            parser.add_argument(flags[-1], action=BooleanOptionalAction, default=SUPPRESS)
        elif isinstance(kind, tuple):
            parser.add_argument(flags[-1], action="append", type=kind[0], default=SUPPRESS)
        else:
            parser.add_argument(flags[-1], type=kind, default=SUPPRESS)
    try:
        settings, unknown = parser.parse_known_args(list(words))
    except ArgumentError as error:
        raise ValueError(f"{error.argument_name}: {error.message}.") from None
    if unknown:
        known = ", ".join(flags) or "no further options"
        raise ValueError(f"{name} takes {known}, got {unknown[0]}.")
    return vars(settings)


def _kind(hint: object, parameter: Parameter) -> type | tuple[type] | None:
    """Type that a word can be converted to, in a tuple if several values are possible; None if
    there is none."""
    if hint is None and parameter.default not in (None, Parameter.empty):
        hint = type(parameter.default)
    choices = [each for each in (get_args(hint) or (hint,)) if each is not NoneType]
    if get_origin(hint) in (list, tuple, Sequence):
        return (choices[0],) if choices[0] in PLAIN else None
    for choice in choices:
        if choice is bool or choice in PLAIN:
            return choice
        if get_origin(choice) in (list, tuple, Sequence):
            return _kind(choice, parameter)
    return None
