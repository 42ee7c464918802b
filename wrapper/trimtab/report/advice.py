"""What to look at first, from the figures alone; what to do about an imbalance is `planning`'s to say. Pure."""

import json
from collections.abc import Iterator

from trimtab.balance.detect import LEAST_STEPS, WARM_UP_STEPS
from trimtab.outcome import ExitCode
from trimtab.report.summary import Finding, Imbalance, Summary, Training
from trimtab.wording import percent, plural

FEWEST_STEPS = WARM_UP_STEPS + LEAST_STEPS
"""Under the latest setting, reported by every stage: with fewer nothing is said of the stages."""


def findings(summary: Summary) -> tuple[Finding, ...]:
    """The findings of a summary, the gravest first; exactly one of kind "none" where there is nothing to change."""
    found = [*_of_the_end(summary), *_of_the_stages(summary.training)]
    return tuple(found) or (Finding("none", _nothing(summary.training)),)


def _of_the_end(summary: Summary) -> Iterator[Finding]:
    match summary.outcome.state, summary.outcome.exit_code:
        case "failed", code if summary.training is None:
            yield Finding(
                "failure",
                f"The job ended with exit code {code}, and no training is recorded. The reason is in the job's output: "
                "mend what it names, and submit again.",
            )
        case "failed", ExitCode.BAD_INPUT:
            yield Finding("failure", f"Mend this, and submit again: {summary.outcome.sentence.rstrip('.')}.")
        case "failed", ExitCode.NOT_STARTED:
            yield Finding("failure", "srun could not start the ranks. Its reason is in the job's output.")
        case "failed", _:
            sentence = summary.outcome.sentence.rstrip(".")
            yield Finding(
                "failure",
                f"Find the cause of the failure first: {sentence}. The whole error is in the job's output.",
            )
        case "stopped", _ if summary.training:
            yield Finding("stopped", _what_was_saved(summary, summary.training))


def _what_was_saved(summary: Summary, training: Training) -> str:
    """Of a run that was stopped: whether anything was saved, and how to go on from there."""
    directory = training.checkpoint_directory
    if not directory:
        return "Nothing was saved: train.checkpoint_directory is empty. The job begins anew when it is run."
    following = summary.attempts[summary.attempt_number :][:1]
    if any((attempt.first_step or 1) > 1 for attempt in following):
        return f"Attempt {summary.attempt_number + 1} went on from what was saved."
    if not training.checkpoints and training.settings[0].first_step == 1:
        return "No checkpoint is recorded: the job begins anew when it is run."
    return (
        f"Progress was saved in {directory}. To go on from there: scontrol requeue {summary.job_id}, as long as Slurm "
        f"knows the job, or a new submission with train.checkpoint_directory = {json.dumps(directory)}."
    )


def _of_the_stages(training: Training | None) -> Iterator[Finding]:
    if training is None or training.imbalance is None or not training.imbalance.triggered:
        return
    if _measured_steps(training) < FEWEST_STEPS:
        return
    yield Finding("imbalance", _slowest(training, training.imbalance))


def _measured_steps(training: Training) -> int:
    return training.cost.measured_steps if training.cost else 0


def _slowest(training: Training, imbalance: Imbalance) -> str:
    stage = next(s for s in training.stages if (s.replica, s.stage) == (imbalance.replica, imbalance.stage))
    holds = [f"layers {stage.layers}"] if stage.layers else []
    holds += ["the embedding"] if stage.embedding else []
    holds += ["the LM head"] if stage.head else []
    replica = f" of replica {stage.replica}" if training.data > 1 else ""
    text = f"Stage {stage.stage}{replica} takes {percent(imbalance.ratio)} longer than {_median(training)}"
    return f"{text}; it holds {_and(holds)}." if holds else f"{text}."


def _median(training: Training) -> str:
    """What stages are held against: of two, the median is their mean."""
    return "the mean of both" if len(training.stages) == 2 else "the median stage"


def _and(names: list[str]) -> str:
    """["a", "b", "c"] -> "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _nothing(training: Training | None) -> str:
    if training is None:
        return "Nothing to change follows from the figures of the devices alone."
    imbalance = training.imbalance
    if training.pipeline == 1 and training.data == 1:
        return "Nothing to change: with one stage, there is no imbalance."
    measured = _measured_steps(training)
    if imbalance is None or measured < FEWEST_STEPS:
        return f"Nothing can be said of the stages: {plural(measured, 'step')} measured, {FEWEST_STEPS} are needed."
    return (
        f"Nothing to balance: the slowest stage takes {percent(imbalance.ratio)} longer than {_median(training)}, "
        f"below the trigger of {percent(imbalance.trigger_ratio)}."
    )
