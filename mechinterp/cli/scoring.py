"""The command that scores a method on models with known answers, and compares scored methods: argument parsing only."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mechinterp.cli.options import JsonOption, QuietOption, WideOption, argument, option
from mechinterp.cli.printing import answer, shown_path

if TYPE_CHECKING:
    from mechinterp.known.entries import Suite
    from mechinterp.known.scores import Scores
    from mechinterp.known.submissions import Submission


def score(
    words: Annotated[
        list[str],
        argument(
            "MODULE:FUNCTION | FILE...",
            "Function of an entry of the suite; with --compare files of this command, or folders of them.",
        ),
    ],
    version: Annotated[
        int | None,
        typer.Option("--suite", help="Version of the suite; default: the newest."),
    ] = None,
    trained: Annotated[
        str, option("--trained", "Trained models: bundled, all (in a clone) or none.")
    ] = "bundled",
    compare: Annotated[
        bool, option("--compare", "Compare the methods of several files on the same entries.")
    ] = False,
    out: Annotated[
        Path | None,
        option(
            "--out",
            "New .json file for the scores; with --compare a new folder for a page and its CSV files.",
        ),
    ] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
    wide: WideOption = False,
) -> None:
    """Score a method on models with known answers. Example: mechinterp score my_module:my_method --out mine.json"""
    if compare:
        return _compare(list(map(Path, words)), out, as_json=as_json, wide=wide)
    if len(words) > 1:
        raise ValueError(f"score takes one MODULE:FUNCTION, got {', '.join(words)}.")
    method = words[0]
    from mechinterp.analysis.registry import own_function
    from mechinterp.known.entries import suite
    from mechinterp.known.scores import score as score_method
    from mechinterp.known.submissions import Submission, require_new_file
    from mechinterp.report.bars import progress_bars

    if out is not None:
        require_new_file(out)
    entries = suite(version, trained=trained)
    with progress_bars(quiet=quiet):
        found = score_method(own_function(method), entries)
    submission = Submission.of(found, entries, method=method)
    if out is not None:
        submission.save(out)
    text = _text(found, submission, out, wide=wide)
    answer(_document(found, submission, entries, out), text, as_json=as_json)


def _document(
    found: "Scores", submission: "Submission", entries: "Suite", out: Path | None
) -> dict[str, Any]:
    from mechinterp.analysis.result import records
    from mechinterp.report.to_json import SCHEMA_VERSION

    return {
        "schema_version": SCHEMA_VERSION,
        "method": submission.method,
        "suite": {"version": entries.version, "sha256": entries.hash, "entries": len(entries)},
        "versions": dict(submission.versions),
        "scores": records(found.summary()),
        "entries": records(found.to_frame()),
        "seconds": dict(submission.seconds),
    } | ({} if out is None else {"submission": str(out)})


def _text(found: "Scores", submission: "Submission", out: Path | None, *, wide: bool) -> str:
    from mechinterp.report.text import frame_text, wrapped

    title = f"{submission.method} on {len(found.seconds)} entries of the suite, version {submission.version}"
    summary = found.summary()
    lines = [
        wrapped(title),
        frame_text(summary if wide else summary.drop(columns="meaning"), wide=wide),
    ]
    if out is not None:
        lines.append(f"Submission: {shown_path(out.resolve())}")
    return "\n".join(lines)


def _compare(paths: list[Path], out: Path | None, *, as_json: bool, wide: bool) -> None:
    from mechinterp.analysis.result import records
    from mechinterp.known.comparing import compare_submissions
    from mechinterp.known.submissions import require_absent
    from mechinterp.report.methods_page import write_methods_page
    from mechinterp.report.to_json import SCHEMA_VERSION
    from mechinterp.report.to_text import to_text

    if out is not None:
        require_absent(out)
    found = compare_submissions(paths)
    one = found.submissions[0]
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "suite": {"version": one.version, "sha256": one.sha256},
        "methods": list(found.names),
        "scores": records(found.to_frame()),
        "differences": records(found.differences()),
    }
    text = to_text("methods", found, wide=wide)
    if out is not None:
        written = write_methods_page(found, out)
        document |= {"page": str(written.page), "tables": [str(t) for t in written.tables]}
        text += f"\nPage: {shown_path(written.page.resolve())}"
    answer(document, text, as_json=as_json)
