"""Shared options of the commands, and what they stand for: files, prompts and devices."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, fields
from functools import cached_property, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from mechinterp.checkpoints.foreign.options import Hints
from mechinterp.checkpoints.io.files import NotUnderstoodError
from mechinterp.cli.files import Files
from mechinterp.cli.own_model import is_own_model
from mechinterp.cli.printing import complain, say_json
from mechinterp.config.task import UNKNOWN_TASK

if TYPE_CHECKING:
    from mechinterp.icl.prompts import Prompts

HELP = ["-h", "--help"]
"""Options that show the help."""
PROMPT_ARRAYS = ("x", "y", "x_query", "y_query", "beta", "y_query_clean")
"""Arrays in a file of prompts; the first four are required."""


def option(flag: str, text: str, **more: Any) -> Any:
    """An option of a command, with its help."""
    return typer.Option(flag, help=text, **more)


def argument(name: str, text: str) -> Any:
    """An argument of a command, with its name in the help."""
    return typer.Argument(metavar=name, help=text)


def new_app() -> typer.Typer:
    """A program without commands."""
    return typer.Typer(
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # rich help doubles the start-up time and uses a third of the width
        add_completion=True,
        context_settings={"help_option_names": HELP},
    )


def add_command(app: typer.Typer, command: Callable[..., None], **more: Any) -> None:
    """Give a program a command with the name, the text and the example of a function.

    The text after "Example:" appears below the options, but not in the list of commands.
    """
    text, _, example = " ".join((command.__doc__ or "").split()).partition(" Example: ")
    name = command.__name__.replace("_", "-")
    app.command(name=name, help=text, epilog=f"Example: {example}", **more)(command)


JsonOption = Annotated[bool, option("--json", "One JSON document on standard output.")]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"],
    option("--device", "Processor or GPU; auto: a GPU if there is one."),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Hide the progress.")]
WideOption = Annotated[
    bool,
    option("--wide", "Show all rows and columns, with standard errors in columns of their own."),
]
PathArgument = Annotated[
    Path,
    argument(
        "MODEL",
        "A checkpoint folder, a file of weights of other code, or my_module:model, a PyTorch module (or a function that makes one) in the current folder.",
    ),
]
PathsArgument = Annotated[
    list[Path],
    argument(
        "MODEL...", "Checkpoints, folders of them, files of weights, or modules my_module:model."
    ),
]
CountOption = Annotated[
    int | None,
    option("--n-prompts", "Number of evaluation prompts; default: the analysis' own number."),
]
SeedOption = Annotated[
    int | None, option("--seed", "Seed of the evaluation prompts; default 0.", min=0)
]
PromptsOption = Annotated[
    Path | None,
    option(
        "--prompts",
        "Your own prompts: arrays x, y, x_query, y_query and, if known, beta, y_query_clean.",
        metavar="FILE.npz",
    ),
]
LengthsOption = Annotated[
    list[int] | None,
    option(
        "--context-length",
        "Pairs per prompt; default: the task's number. Repeatable for curves.",
        min=1,
    ),
]


def _hint_option(hint: Field) -> Any:
    """Annotation of the option for one field of `Hints`."""
    more = dict(hint.metadata)
    kind, names = more.pop("kind", get_args(hint.type)[0]), more.pop("names", ())
    values = more.pop("values", ())
    more.setdefault("metavar", "|".join(values) or None)
    return Annotated[kind | None, typer.Option(*names, **more)]


def hints_of(**given: Any) -> Hints:
    """Settings that the options state for files that do not state them."""
    from mechinterp.config import task_fields

    task, rows = given.pop("task", None), given.pop("model", None)
    joins = (row.partition("=") for row in rows or ())
    model = {name: _typed(value) for name, _, value in joins} or None
    renamed = (row.partition("=") for row in given.pop("map", None) or ())
    names = {theirs: known for theirs, _, known in renamed} or None
    fields = None if task is None else task_fields(_task_of(task))
    return Hints(task=fields, model=model, map=names, **given)


def _task_of(text: str) -> Mapping[str, object] | Path:
    """Task of --task: fields in JSON text, or else the path of a JSON file."""
    import json

    if not text.lstrip().startswith("{"):
        return Path(text)
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"--task must be a JSON file or JSON text, got {text!r:.80} ({error})."
        ) from None


def _typed(text: str) -> str | bool | int | float:
    """Value of a typed word: true, false, a number or a text."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def keyword(name: str, annotation: object, default: object = None) -> Parameter:
    """Argument of a command, by name only."""
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


HINTS = [keyword(hint.name, _hint_option(hint)) for hint in fields(Hints)]
VerboseOption = Annotated[
    bool,
    option(
        "--verbose",
        "Also name settings that are known or rarely matter, and the readings of a file that were tried.",
    ),
]


@dataclass(frozen=True)
class Request:
    """Options of the commands that run an analysis."""

    prompts: PromptsOption = None
    n_prompts: CountOption = None
    seed: SeedOption = None
    context_lengths: LengthsOption = None
    quiet: QuietOption = False
    as_json: JsonOption = False
    wide: WideOption = False

    @property
    def files(self) -> tuple[Path, ...]:
        """The file of prompts, if any; errors may begin with its name."""
        return () if self.prompts is None else (self.prompts,)

    @cached_property
    def given(self) -> "Prompts | None":
        """Prompts of the file; None: prompts are drawn."""
        return None if self.prompts is None else prompts_of(self.prompts)

    @property
    def context_length(self) -> int | None:
        """The one length that was given; None: that of the task."""
        lengths = self.context_lengths or []
        if len(lengths) > 1:
            raise ValueError(f"--context-length must be given once, got {lengths}.")
        return lengths[0] if lengths else None

    @property
    def drawn_by(self) -> dict[str, Any]:
        """Prompts of the file, or number, seed and length of drawn ones, for `run_analysis`."""
        names = ("n_prompts", "seed", "context_length")
        return {"prompts": self.given} | {name: getattr(self, name) for name in names}

    @property
    def note(self) -> dict[str, object]:
        """Field of the JSON document that names the file of prompts, if any."""
        from mechinterp.analysis.registry import target_note

        if self.given is None:
            return {}
        return {"prompts": {"file": str(self.prompts), "note": target_note(self.given)}}


def prompts_of(file: Path) -> "Prompts":
    """Prompts from the arrays of a file.

    Raises:
        ValueError: If it is not an .npz file of numbers, an array is missing or unknown, or the
            shapes do not fit.
    """
    import zipfile

    import numpy as np

    from mechinterp.analysis.registry import target_note
    from mechinterp.icl.prompts import Prompts

    wrong = f"{file}: must be an .npz file of the arrays {', '.join(PROMPT_ARRAYS)}"
    if file.suffix != ".npz" or not file.is_file():
        raise ValueError(f"{wrong}, got {'another file' if file.exists() else 'nothing'}.")
    try:
        with np.load(file, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    except (OSError, EOFError, ValueError, AttributeError, zipfile.BadZipFile):
        raise ValueError(
            f"{wrong}, got a file that is not .npz, or has other values than numbers."
        ) from None
    for name in [
        *(n for n in PROMPT_ARRAYS[:4] if n not in found),
        *(n for n in found if n not in PROMPT_ARRAYS),
    ]:
        what = "is unknown" if name in found else "is missing"
        raise ValueError(f"{wrong}; {name} {what}, the file has {', '.join(found) or 'none'}.")
    try:
        prompts = Prompts.from_arrays(**found)
    except ValueError as error:
        raise ValueError(f"{file}: not prompts ({str(error).removesuffix('.')}).") from None
    if note := target_note(prompts):
        complain(f"{file}: {note}.")
    return prompts


def find_paths(given: dict[str, Any]) -> None:
    """Replace the names of shipped models by their paths, and refuse a path that does not exist before anything is loaded.

    If there are several paths, or the output is JSON or a table, the command itself reports the error.
    """
    from mechinterp.checkpoints.io.files import nothing_at
    from mechinterp.checkpoints.shipped import shipped_path

    several = "paths" in given
    if given.get("predictions") and several and len(given["paths"]) > 1:
        raise ValueError(f"--predictions are those of one file, got {len(given['paths'])} paths.")
    stated = given["paths"] if several else [given["path"]]
    paths = [path if is_own_model(path) else shipped_path(path) for path in stated]
    given |= {"paths": paths} if several else {"path": paths[0]}
    table = Path(str(given.get("out"))).suffix in (".csv", ".parquet")
    reported = several and (len(paths) > 1 or given.get("as_json") or table)
    if not reported and not is_own_model(paths[0]) and not os.path.lexists(paths[0]):
        raise nothing_at(paths[0])


def reads_files(
    *, device: bool = False, request: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options for reading files, as its argument `files`.

    Args:
        device: True: also --device; False: the processor.
        request: True: also the options of `Request`, as its argument `request`.
    """
    shared = list(signature(Request).parameters.values()) if request else []
    options = [*shared, *HINTS, keyword("verbose", VerboseOption, default=False)]
    if device:
        options.append(keyword("device", DeviceOption, "auto"))

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            find_paths(given)
            path, as_json = given.get("path"), given.get("as_json")
            stated = {p.name: given.pop(p.name) for p in HINTS}
            law = UNKNOWN_TASK if str(stated["task"]) == UNKNOWN_TASK else None
            hints = hints_of(**stated | ({} if law is None else {"task": None}))
            device_name, verbose = given.pop("device", "cpu"), given.pop("verbose")
            files = Files(hints, device_of(device_name), law, verbose)
            if request:
                given["request"] = Request(**{p.name: given.pop(p.name) for p in shared})
            try:
                command(**given, files=files)
            except NotUnderstoodError as error:
                if as_json:
                    say_json({"path": str(path), "understood": False, "error": str(error)})
                raise

        every = signature(command).parameters.values()
        own = [p for p in every if p.name not in ("request", "files")]
        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (*own, *options)]
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return with_options


def device_of(device: str) -> str:
    """Device for --device: a GPU if PyTorch can use one, unless --device is cpu."""
    if device == "cpu":
        return device
    import torch

    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ValueError("--device cuda needs a GPU that PyTorch can use; there is none.")
    return "cuda" if available else "cpu"
