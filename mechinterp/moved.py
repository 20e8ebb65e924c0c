"""Old names of modules that documents and notebooks of 0.1 showed; each stands for the module of today and warns."""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from warnings import warn

MOVED = {
    "analysis.analyses": "analysis.registry",
    "analysis.dynamics": "analysis.training",
    "analysis.dynamics.coefficient_snapshots": "analysis.training.coefficient_snapshots",
    "analysis.dynamics.deep_snapshots": "analysis.training.deep_snapshots",
    "analysis.dynamics.plateaus": "analysis.training.plateaus",
    "analysis.dynamics.training": "analysis.training.over_training",
    "analysis.heads": "analysis.ablation",
    "analysis.heads.pruning": "analysis.ablation.pruning",
    "analysis.heads.pruning_curves": "analysis.ablation.pruning_curves",
    "analysis.probing.probes": "analysis.probing.linear",
    "models.adapter": "models.hooked.runner",
    "models.constructions_algorithms": "models.constructions.descent",
    "models.constructions_sparse": "models.constructions.sparse",
    "models.deep": "models.run.general",
    "training.deep": "training.general.trainer",
    "training.flow": "training.linear.flow",
    "training.packs": "training.jobs",
    "training.step": "training.one_layer.step",
    "training.sweep": "training.train",
}
"""Old and new names, within `mechinterp`."""


class MovedModules(MetaPathFinder, Loader):
    """Finds a module of today under its old name."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != "mechinterp" or name not in MOVED:
            return None
        return spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = f"mechinterp.{MOVED[spec.name.partition('.')[2]]}"
        warn(f"{spec.name} is {new} now.", DeprecationWarning, stacklevel=2)
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        new = import_module(f"mechinterp.{MOVED[module.__name__.partition('.')[2]]}")
        sys.modules[module.__name__] = new


def find_moved_modules() -> None:
    """From now on old names are found.

    Before all others: `analysis.dynamics.plateaus` would else be a second copy of a file of `analysis.training`.
    """
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())
