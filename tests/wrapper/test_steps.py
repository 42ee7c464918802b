from trimtab.balance.measuring.steps import StageStep, assemble
from trimtab.protocol import Hello, StepReport


def hello(rank, *, tensor=0, pipeline=0, data=0):
    return Hello("", rank, f"n{rank}", 0, 100 + rank, tensor, pipeline, data, (0,), 1, "")


def report(rank, forward, backward, **more):
    fields = {"step": 3, "time_seconds": 50.0 + rank, "duration_seconds": 2.0 + rank, "microbatches": 4, "tokens": 1024}
    fields["squared_lengths"] = 65536
    return StepReport(
        rank=rank, forward_seconds=forward, backward_seconds=backward, peak_memory_bytes=rank, **fields | more
    )


def test_a_step_is_put_together_from_its_ranks():
    ranks = {
        0: hello(0, tensor=0, pipeline=0),
        1: hello(1, tensor=1, pipeline=0),
        2: hello(2, tensor=0, pipeline=1),
        3: hello(3, tensor=1, pipeline=1),
    }
    step = assemble(
        [
            report(0, 1.0, 2.0),
            report(1, 1.5, 2.5),
            report(2, 2.0, 3.0, loss=4.5, consumed_samples=48),
            report(3, 1.0, 1.0),
        ],
        ranks,
    )
    # each stage is its slowest tensor-parallel rank, with the largest memory of them
    assert step.stages == (
        StageStep(3, 0, 0, 1.5, 2.5, 4, 1024, 65536, 1),
        StageStep(3, 0, 1, 2.0, 3.0, 4, 1024, 65536, 3),
    )
    assert (step.loss, step.consumed_samples, step.duration_seconds, step.time_seconds) == (4.5, 48, 5.0, 53.0)
    assert (step.places, step.replicas) == (((0, 0), (0, 1)), 1)
    assert step.relative_seconds([1.0]) == (4.0, 5.0)
    assert step.relative_seconds([0.5]) == (8.0, 10.0)
    assert step.tokens == 1024  # the same tokens pass both stages


def test_tokens_add_up_over_replicas():
    ranks = {0: hello(0, data=0), 1: hello(1, data=1)}
    assert assemble([report(0, 1.0, 1.0), report(1, 1.0, 1.0)], ranks).tokens == 2048
