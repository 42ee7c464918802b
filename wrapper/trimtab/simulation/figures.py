"""A comparison as plain values, for JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trimtab.balance.deciding.search import Outcome
from trimtab.simulation.compare import Comparison
from trimtab.simulation.needs import LEAST_STAGE_EFFICIENCY, MOST_BUBBLE, Need
from trimtab.simulation.sentences import assumptions, fails_where


def as_json(comparison: Comparison, needs: Sequence[Need], statics: Sequence[Outcome]) -> dict[str, Any]:
    """Every figure; names end in their unit."""
    question, training = comparison.question, comparison.training
    static, chosen, other = comparison.static, comparison.chosen, comparison.other
    return {
        "model": asdict(training.sizes)
        | {"parameters": training.sizes.parameters, "flops_per_token": training.sizes.model_flops_per_token},
        "gpus": question.cluster.gpus,
        "gpus_per_node": question.cluster.gpus_per_node,
        "gpu": question.cluster.accelerator.name,
        "global_batch_size": training.global_batch_size,
        "optimizer": str(training.optimizer),
        "static": outcome_figures(comparison, static),
        "chosen": outcome_figures(comparison, chosen),
        "other": outcome_figures(comparison, other) if other else None,
        "speedup_ratio": static.estimate.step_seconds / chosen.estimate.step_seconds,
        "assumptions": assumptions(comparison.appraiser),
        "needed": {
            "stage_efficiency_ratio": LEAST_STAGE_EFFICIENCY,
            "bubble_ratio": MOST_BUBBLE,
            "shapes": [_need_figures(comparison, need) for need in needs],
            "static_by_microbatches": [
                {
                    "microbatches": max(one.configuration.microbatches),
                    "stage_efficiency_ratio": one.estimate.stage_efficiency_ratio,
                    "bubble_ratio": one.estimate.bubble_ratio,
                }
                for one in statics
            ],
            "optimizer_states": [asdict(state) for state in comparison.states],
        },
        "fails_where": fails_where(comparison, needs, statics),
        "considered": [
            {
                "configuration": str(one.configuration),
                "step_seconds": one.step_seconds,
                "verdict": one.verdict,
            }
            for one in comparison.search.considered
        ],
    }


def outcome_figures(comparison: Comparison, outcome: Outcome) -> dict[str, Any]:
    """One plan."""
    configuration, plan, estimate = outcome.configuration, outcome.plan, outcome.estimate
    return {
        "tensor": configuration.shape.tensor,
        "pipeline": configuration.shape.pipeline,
        "data": configuration.shape.data,
        "schedule": str(plan.schedule),
        "virtual": configuration.virtual,
        "microbatch_size": configuration.microbatch_size,
        "microbatches": max(configuration.microbatches),
        "fewest_microbatches": min(configuration.microbatches),
        "layout": str(plan.layout),
        "chunk_layers": list(plan.layout.layers),
        "stage_layers": stage_layers(outcome),
        "recomputed_layers": list(plan.recomputed_layers),
        "node_order": list(outcome.node_order),
        "step_seconds": estimate.step_seconds,
        "overhead_seconds": outcome.overhead_seconds,
        "stage_seconds": estimate.stage_seconds[0].tolist(),
        "stage_efficiency_ratio": estimate.stage_efficiency_ratio,
        "balance_ratio": estimate.balance_ratio,
        "bubble_ratio": estimate.bubble_ratio,
        "peak_memory_bytes": max(outcome.memory_bytes),
        "stage_memory_bytes": list(outcome.memory_bytes),
        "fits": outcome.fits,
        "tokens_per_second": comparison.tokens_per_second(outcome),
        "utilization_ratio": comparison.utilization_ratio(outcome),
    }


def stage_layers(outcome: Outcome) -> list[int]:
    """[S] layers of each stage, over all its chunks."""
    layout = outcome.plan.layout
    return [len(layout.stage_layers(stage)) for stage in range(layout.stages)]


def _need_figures(comparison: Comparison, need: Need) -> dict[str, Any]:
    return {
        "tensor": need.shape.tensor,
        "pipeline": need.shape.pipeline,
        "data": need.shape.data,
        "schedule": str(need.schedule),
        "virtual": need.virtual,
        "balance_ratio": need.balance_ratio,
        "obstacle": need.obstacle or None,
        "reached": outcome_figures(comparison, need.reached) if need.reached else None,
    }
