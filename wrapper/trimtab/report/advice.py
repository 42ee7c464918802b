"""What to change, from what was measured; an estimate says what it assumes. Pure."""

import re
from collections.abc import Iterator, Sequence
from statistics import median

from trimtab.balance.detect import imbalance_ratio
from trimtab.outcome import ExitCode
from trimtab.report.summary import Finding, Imbalance, Stage, Summary, Training
from trimtab.report.wording import percent, plural

FEWEST_STEPS = 5
"""With fewer measured steps nothing is said of the stages: the first ones include warm-up."""
LEAST_GAIN_RATIO = 0.02
"""A layout that makes the slowest stage faster by less is not worth a change."""


def findings(summary: Summary) -> tuple[Finding, ...]:
    """The findings of a summary, the gravest first; exactly one of kind "none" where there is nothing to change."""
    found = [*_of_the_end(summary), *_of_the_stages(summary.training)]
    return tuple(found) or (Finding("none", _nothing(summary.training)),)


def _of_the_end(summary: Summary) -> Iterator[Finding]:
    match summary.outcome.state, summary.outcome.exit_code:
        case "failed", ExitCode.BAD_INPUT:
            yield Finding("failure", "Nothing was started. Mend what the job's output names, and submit again.")
        case "failed", ExitCode.NOT_STARTED:
            yield Finding("failure", "srun could not start the ranks. Its reason is in the job's output.")
        case "failed", _:
            yield Finding(
                "failure",
                f"Find the cause of the failure first: {summary.outcome.sentence}. The whole error is in the job's "
                "output.",
            )
        case "stopped", _:
            yield Finding("stopped", "Progress was saved. Submit or requeue the job, and it goes on from there.")


def _of_the_stages(training: Training | None) -> Iterator[Finding]:
    if training is None or training.imbalance is None or not training.imbalance.triggered:
        return
    imbalance = training.imbalance
    if imbalance.measured_steps < FEWEST_STEPS:
        return
    yield Finding("imbalance", _slowest(training, imbalance))
    if training.data > 1 and (lone := _lone_replica(training, imbalance)):
        yield Finding("devices", lone)
    elif layout := _layout(training):
        yield Finding("layout", layout)


def _slowest(training: Training, imbalance: Imbalance) -> str:
    stage = next(s for s in training.stages if (s.replica, s.stage) == (imbalance.replica, imbalance.stage))
    holds = [f"layers {stage.layers}"] if stage.layers else []
    holds += ["the embedding"] if stage.embedding else []
    holds += ["the LM head"] if stage.head else []
    replica = f" of replica {stage.replica}" if training.data > 1 else ""
    text = f"Stage {stage.stage}{replica} takes {percent(imbalance.ratio)} longer than the median stage"
    return f"{text}; it holds {' and '.join(holds)}." if holds else f"{text}."


def _lone_replica(training: Training, imbalance: Imbalance) -> str:
    """A text if the slowest stage is slow in one replica only: its peers have the same layers, so layers are not it."""
    peers = [
        stage.compute_seconds or 0.0
        for stage in training.stages
        if stage.stage == imbalance.stage and stage.replica != imbalance.replica
    ]
    own = max(stage.compute_seconds or 0.0 for stage in training.stages if stage.stage == imbalance.stage)
    apart = own / median(peers) - 1 if median(peers) > 0 else 0.0
    if apart < imbalance.trigger_ratio:
        return ""
    return (
        f"It takes {percent(apart)} longer than the same stage of the other replicas, which holds the same layers: "
        f"look at the devices and the data of replica {imbalance.replica}, not at the layout."
    )


def _layout(training: Training) -> str:
    """A better split of the layers, estimated; empty where there is none or it cannot be estimated."""
    stages = _mean_over_replicas(training)
    layers = [_count(stage.layers) for stage, _ in stages]
    if training.own_model or training.virtual > 1 or len(stages) < 2 or not sum(layers):
        return ""
    seconds = [compute for _, compute in stages]
    costs = [compute / held for compute, held in zip(seconds[:-1], layers[:-1], strict=True) if held]
    if not costs or min(seconds) <= 0:
        return ""
    layer = median(costs)
    head = max(0.0, seconds[-1] - layer * layers[-1])
    shares = best_shares(sum(layers), len(stages), head / layer)
    estimate = [layer * share + (head if index == len(shares) - 1 else 0.0) for index, share in enumerate(shares)]
    if max(estimate) > max(seconds) * (1 - LEAST_GAIN_RATIO):
        return (
            "No split of whole layers would make the slowest stage clearly faster. Estimated, assuming that all layers "
            "cost the same and that the rest of the last stage is the LM head."
        )
    return (
        f'parallel.layout = "{layout_text(shares)}" would bring the imbalance to about '
        f"{percent(imbalance_ratio(estimate))}, and the slowest stage from {max(seconds) * 1000:,.0f} to "
        f"{max(estimate) * 1000:,.0f} ms a step. Estimated, assuming that all layers cost the same "
        f"({layer * 1000:,.1f} ms) and that the rest of the last stage ({head * 1000:,.1f} ms) is the LM head."
    )


def best_shares(layers: int, stages: int, head: float) -> tuple[int, ...]:
    """How many layers each stage takes so that the slowest one is fastest; the last also carries a `head`.

    `head` is in units of a layer. Every stage but the last has at least one layer. Of equal splits, the one with the
    most layers on the last stage: it moves the fewest.
    """
    best: tuple[float, tuple[int, ...]] | None = None
    for last in range(layers - (stages - 1), -1, -1):
        least, more = divmod(layers - last, stages - 1)
        shares = (*(least + (index < more) for index in range(stages - 1)), last)
        slowest = max(shares[0], last + head)
        if best is None or slowest < best[0]:
            best = slowest, shares
    if best is None:
        raise ValueError(f"{layers} layers cannot be split over {stages} stages")
    return best[1]


def layout_text(shares: Sequence[int]) -> str:
    """Layers of each stage -> a layout as Megatron-core writes it: (5, 3) -> "Ettttt|tttL"."""
    return "E" + "|".join("t" * share for share in shares) + "L"


def _mean_over_replicas(training: Training) -> list[tuple[Stage, float]]:
    """Each stage of the first replica, with its compute averaged over the replicas."""
    means = []
    for stage in (stage for stage in training.stages if stage.replica == training.stages[0].replica):
        peers = [peer.compute_seconds or 0.0 for peer in training.stages if peer.stage == stage.stage]
        means.append((stage, sum(peers) / len(peers)))
    return means


def _count(layers: str) -> int:
    """Number of layers in "0-3,8"; 0 in a text of another form."""
    if not re.fullmatch(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", layers, re.ASCII):
        return 0
    spans = (span.partition("-") for span in layers.split(","))
    return sum(max(0, int(last or first) - int(first) + 1) for first, _, last in spans)


def _nothing(training: Training | None) -> str:
    if training is None:
        return "Nothing to change follows from the figures of the devices alone."
    imbalance = training.imbalance
    if training.pipeline == 1 and training.data == 1:
        return "Nothing to change: with one stage, there is no imbalance."
    if imbalance is None or imbalance.measured_steps < FEWEST_STEPS:
        measured = imbalance.measured_steps if imbalance else 0
        return f"Nothing can be said of the stages: {plural(measured, 'step')} measured, {FEWEST_STEPS} are needed."
    return (
        f"Nothing to change: the slowest stage takes {percent(imbalance.ratio)} longer than the median one, below the "
        f"trigger of {percent(imbalance.trigger_ratio)}."
    )
