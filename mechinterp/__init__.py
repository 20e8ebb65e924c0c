"""What attention models compute when they do in-context linear regression.

The names below are loaded when they are first used, so that `import mechinterp` stays light.
"""

from mechinterp.moved import find_moved_modules
from mechinterp.rooms import names_of
from mechinterp.version import __version__

_HOMES = {
    "load": "mechinterp.checkpoints.load",
    "load_run": "mechinterp.checkpoints.load",
    "from_pretrained": "mechinterp.checkpoints.hub",
    "push_to_hub": "mechinterp.report.hub",
    "model_card": "mechinterp.report.hub",
    "hook_module": "mechinterp.checkpoints.plain_modules",
    "ExperimentConfig": "mechinterp.config",
    "TaskConfig": "mechinterp.config",
    "generator_for": "mechinterp.icl.prompts",
    "Prompts": "mechinterp.icl.prompts",
    "sample_prompts": "mechinterp.icl.prompts",
    "task_pool": "mechinterp.icl.prompts",
    "ModelConfig": "mechinterp.config",
    "predictor_of": "mechinterp.models.run.predictor",
    "evaluation_prompts": "mechinterp.models.run.evaluation",
    "circuits": "mechinterp.analysis.one_layer.circuits",
    "classify": "mechinterp.analysis.one_layer.classify",
    "classify_circuits": "mechinterp.analysis.one_layer.classify",
    "classify_layers": "mechinterp.analysis.multi_layer.classify",
    "name_algorithm": "mechinterp.analysis.multi_layer.algorithm",
    "intervene_on_steps": "mechinterp.analysis.multi_layer.step_interventions",
    "fit_learners": "mechinterp.analysis.learners.fits",
    "dmmse": "mechinterp.icl.pools",
    "compare_priors": "mechinterp.analysis.learners.priors",
    "prior_heads": "mechinterp.analysis.ablation.prior_heads",
    "prior_snapshots": "mechinterp.analysis.training.prior_snapshots",
    "ablate_heads": "mechinterp.analysis.ablation.single",
    "ablate_subsets": "mechinterp.analysis.ablation.subsets",
    "mask_heads": "mechinterp.models.hooked.masks",
    "masked": "mechinterp.models.hooked.runner",
    "ablate_pairs": "mechinterp.analysis.ablation.pairs",
    "greedy_order": "mechinterp.analysis.ablation.orders",
    "learn_gates": "mechinterp.analysis.ablation.gates",
    "prune": "mechinterp.analysis.ablation.pruning",
    "fine_tune": "mechinterp.analysis.ablation.fine_tuning",
    "probe_layers": "mechinterp.analysis.probing.linear",
    "p_probe": "mechinterp.analysis.probing.feature_descent",
    "patch_positions": "mechinterp.analysis.patching.positions",
    "attribute_edges": "mechinterp.analysis.patching.edges",
    "train": "mechinterp.training.train",
    "check_compatible": "mechinterp.models.compatibility.check",
    "write_report": "mechinterp.report.page",
    "attention_patterns": "mechinterp.analysis.one_layer.attention",
    "attention_entropy": "mechinterp.analysis.one_layer.attention_entropy",
    "composition_scores": "mechinterp.analysis.multi_layer.composition",
    "read_out_by_layer": "mechinterp.analysis.probing.read_out_by_layer",
    "save_figure": "mechinterp.paper",
    "local_learning_coefficient": "mechinterp.analysis.training.learning_coefficient",
    "milestones": "mechinterp.analysis.training.milestones",
    "Monitor": "mechinterp.analysis.training.monitor",
    "training_snapshots": "mechinterp.analysis.training.snapshots",
    "training_dynamics": "mechinterp.analysis.training.over_training",
    "plateaus": "mechinterp.analysis.training.plateaus",
    "linear_snapshots": "mechinterp.analysis.training.linear_components",
    "jump_forecast": "mechinterp.analysis.training.jump_forecast",
    "sweep_frame": "mechinterp.analysis.sweep_table",
    "train_models": "mechinterp.training.train",
    "override": "mechinterp.config",
    "preset": "mechinterp.presets",
    "ICLTransformer": "mechinterp.models.hooked.transformer",
}
__all__ = ["__version__", *_HOMES]


find_moved_modules()


__getattr__ = names_of(__name__, _HOMES)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
