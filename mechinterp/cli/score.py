"""The command that scores a method on the suite of known answers: argument parsing only."""

from typing import Annotated

import typer

from mechinterp.cli.options import JsonOption, QuietOption, answer, option


def score(
    method: Annotated[
        str, typer.Argument(metavar="MODULE:FUNCTION", help="Function of an entry of the suite.")
    ],
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
    from mechinterp.report.header import SCHEMA_VERSION
    from mechinterp.report.text import frame_text, wrapped

    entries = suite(version, trained=trained)
    with progress_bars(quiet=quiet) as progress:
        found = score_method(own_function(method), entries, progress=progress)
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
