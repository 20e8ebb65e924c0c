"""Models of the commands, from the paths and settings that were typed."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mechinterp.checkpoints.foreign.options import Hints
from mechinterp.cli.own_model import is_own_model, module_of_file, own_source, require_model
from mechinterp.cli.printing import complain, complain_in_rows

if TYPE_CHECKING:
    from mechinterp.checkpoints.checkpoint import Checkpoint
    from mechinterp.checkpoints.modules.hooked import HookedModule
    from mechinterp.models.run.predictor import Learner

LENGTH = "task.context_length"
"""Name of the assumed setting that --context-length replaces."""


@dataclass(frozen=True)
class Files:
    """Settings for reading files, the device on which models run, and the law of given prompts."""

    hints: Hints
    device: str = "cpu"
    law: str | None = None
    """"unknown": the law of given prompts is unknown; None: that of the model is in force."""
    verbose: bool = False
    """True: the assumptions on a file are listed in full."""

    def model(self, path: Path, context_length: int | None = None) -> "Checkpoint | HookedModule":
        """Checkpoint at a path, or module my_module:model; assumptions are printed to standard
        error."""
        return require_model(path, self.source(path, context_length))

    def source(
        self, path: Path, context_length: int | None = None
    ) -> "Checkpoint | HookedModule | Learner":
        """Checkpoint, module or function of prompts my_module:mine; assumptions are printed to standard
        error."""
        from mechinterp.checkpoints.checkpoint import Checkpoint
        from mechinterp.checkpoints.modules.hooked import HookedModule

        found = self.opened(path)
        if isinstance(found, Checkpoint):
            return self._announced(found, context_length)
        if not isinstance(found, HookedModule):
            return found
        if context_length is not None and LENGTH in found.assumed:
            found = found.at_length(context_length)
        task = found.task
        words = {f"task.{n}": w for n, w in task.fields_in_words.items() if n in task.assumed}
        if words:
            from mechinterp.report.grounds import in_words

            title = f"{path}: hooked with these settings; what is assumed may be wrong"
            complain_in_rows(title, {"assumed": in_words(words, full=self.verbose)})
        return found

    def opened(self, path: Path) -> "Checkpoint | HookedModule | Learner":
        """Checkpoint, module or function, without a word about assumptions; a file with recurrent layers of libraries is a module."""
        if is_own_model(path):
            return own_source(str(path), self.hints, self.device)
        from mechinterp.checkpoints.foreign.tensors.kinds import RecurrentError
        from mechinterp.checkpoints.io.files import CheckpointError

        try:
            return self._loaded(path)
        except CheckpointError as error:
            if not isinstance(error.__context__, RecurrentError):
                raise
            return module_of_file(path, self.hints, self.device)

    def load(self, path: Path | Sequence[Path], context_length: int | None = None) -> "Checkpoint":
        """Checkpoint at a path, or run of the files of several steps; assumptions are printed to
        standard error."""
        return self._announced(self._loaded(path), context_length)

    def _loaded(self, path: Path | Sequence[Path]) -> "Checkpoint":
        from mechinterp.checkpoints.load import load

        given: dict[str, Any] = dict(self.hints.given)
        checkpoint = load(path, **given)
        return checkpoint if self.device == "cpu" else checkpoint.to(self.device)

    def _announced(self, checkpoint: "Checkpoint", context_length: int | None) -> "Checkpoint":
        if context_length is not None and LENGTH in checkpoint.assumed:
            checkpoint = checkpoint.at_length(context_length)
        if checkpoint.kept:
            steps = f"steps {checkpoint.steps[0]} to {checkpoint.steps[-1]}"
            complain(f"{checkpoint.path}: {len(checkpoint.kept)} files are one run, {steps}.")
        if checkpoint.assumed:
            from mechinterp.report.grounds import rows_by_ground

            rows = rows_by_ground(checkpoint, full=self.verbose)
            complain_in_rows(f"{checkpoint.path}: read with these settings; what is assumed may be wrong", rows)  # fmt: skip
        return checkpoint

    def run_of(
        self, paths: Sequence[Path], context_length: int | None = None
    ) -> "Checkpoint | None":
        """The run to which all these paths belong; None if they are separate models."""
        from mechinterp.checkpoints.io.files import CheckpointError

        if len(paths) > 1 and not any(map(is_own_model, paths)):
            with suppress(CheckpointError):  # the error of each file is reported later
                return self.load(paths, context_length)
        return None
