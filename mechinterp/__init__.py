"""What attention models compute when they do in-context linear regression.

The names below are loaded when they are first used, so that `import mechinterp` stays light.
"""

from importlib import import_module

from mechinterp.version import __version__

_HOMES = {
    "load": "mechinterp.checkpoints.loading",
    "hook_module": "mechinterp.checkpoints.plain_modules",
    "ExperimentConfig": "mechinterp.config",
    "TaskConfig": "mechinterp.config",
    "generator_for": "mechinterp.icl.prompts",
    "Prompts": "mechinterp.icl.prompts",
    "sample_prompts": "mechinterp.icl.prompts",
    "task_pool": "mechinterp.icl.prompts",
    "ModelConfig": "mechinterp.config",
    "predictor_of": "mechinterp.models.predictor",
    "evaluation_prompts": "mechinterp.models.evaluation",
    "circuits": "mechinterp.analysis.circuits.circuits",
    "classify": "mechinterp.analysis.circuits.patterns",
    "classify_circuits": "mechinterp.analysis.circuits.patterns",
    "classify_layers": "mechinterp.analysis.learners.layered",
    "name_algorithm": "mechinterp.analysis.learners.algorithm",
    "intervene_on_steps": "mechinterp.analysis.learners.algorithm_steps",
    "fit_learners": "mechinterp.analysis.learners.fits",
    "dmmse": "mechinterp.icl.pools",
    "compare_priors": "mechinterp.analysis.learners.priors",
    "prior_heads": "mechinterp.analysis.heads.prior_heads",
    "prior_snapshots": "mechinterp.analysis.dynamics.prior_snapshots",
    "ablate_heads": "mechinterp.analysis.heads.ablation",
    "ablate_subsets": "mechinterp.analysis.heads.subsets",
    "mask_heads": "mechinterp.models.masks",
    "masked": "mechinterp.models.adapter",
    "ablate_pairs": "mechinterp.analysis.heads.pairs",
    "greedy_order": "mechinterp.analysis.heads.pairs",
    "learn_gates": "mechinterp.analysis.heads.gates",
    "prune": "mechinterp.analysis.heads.pruning",
    "fine_tune": "mechinterp.analysis.heads.fine_tuning",
    "probe_layers": "mechinterp.analysis.probing.probes",
    "p_probe": "mechinterp.analysis.probing.p_probing",
    "patch_positions": "mechinterp.analysis.heads.patching",
    "attribute_edges": "mechinterp.analysis.heads.edges",
    "train": "mechinterp.training.sweep",
    "check_compatible": "mechinterp.models.conformance",
    "write_report": "mechinterp.report.page",
    "attention_patterns": "mechinterp.analysis.circuits.attention",
    "local_learning_coefficient": "mechinterp.analysis.dynamics.learning_coefficient",
    "milestones": "mechinterp.analysis.dynamics.milestones",
    "training_snapshots": "mechinterp.analysis.dynamics.snapshots",
    "training_dynamics": "mechinterp.analysis.dynamics.training",
    "plateaus": "mechinterp.analysis.dynamics.plateaus",
    "linear_snapshots": "mechinterp.analysis.dynamics.linear_snapshots",
    "jump_forecast": "mechinterp.analysis.dynamics.jumps",
    "sweep_frame": "mechinterp.analysis.results",
    "train_models": "mechinterp.training.sweep",
    "override": "mechinterp.config",
    "preset": "mechinterp.presets",
    "ICLTransformer": "mechinterp.models.transformer",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'mechinterp' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
