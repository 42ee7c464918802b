"""Profiles as a run leaves them, made up of plain numbers, for the tests of the report."""

import dataclasses
import math

import numpy as np
import pytest

from trimtab.protocol import Batch, Job, Model, Parallel, Train, job_to_json
from trimtab_slurm.contents import DeviceProfile, Event, NodeProfile, Profile, TrainingProfile

START_SECONDS = 1_780_000_000.0
LAYER_SECONDS = 0.15
HEAD_SECONDS = 0.25
STEP_SECONDS = 1.5
PERIOD_SECONDS = 1.0


def make_profile(
    *,
    pipeline=2,
    tensor=2,
    data=1,
    layers=8,
    steps=30,
    ranks_per_node=2,
    head_seconds=HEAD_SECONDS,
    microbatches=8,
    slow=None,
    exit_code=0,
    outcome="trained to step 30",
    seconds=60.0,
):
    """A run whose stages cost LAYER_SECONDS a layer, the last one `head_seconds` more, and 1/3 of it is forward.

    `slow` is (replica, stage, factor). Steps end STEP_SECONDS apart, the first after 10 s; each device is used half.
    """
    world = tensor * pipeline * data
    nodes = tuple(f"n{index + 1}" for index in range(-(-world // ranks_per_node)))
    job = Job(
        model=Model(layers=layers),
        parallel=Parallel(tensor=tensor, pipeline=pipeline),
        batch=Batch(microbatch_size=2, global_batch_size=2 * microbatches * data),
        train=Train(steps=max(steps, 30)),
    )
    places = [(replica, stage) for replica in range(data) for stage in range(pipeline)]

    def compute(replica, stage):
        seconds = LAYER_SECONDS * layers / pipeline + (head_seconds if stage == pipeline - 1 else 0.0)
        return seconds * (slow[2] if slow and (replica, stage) == slow[:2] else 1.0)

    number = np.arange(1, steps + 1)
    rows = [(step, replica, stage) for step in number for replica, stage in places]
    training = TrainingProfile(
        start_seconds=START_SECONDS + 1,
        end_seconds=START_SECONDS + seconds - 1,
        attributes={
            "tensor": tensor,
            "pipeline": pipeline,
            "data": data,
            "exit_code": exit_code,
            "outcome": outcome,
            "trigger_ratio": 0.1,
            "window_steps": 20,
            "job": job_to_json(job),
        },
        steps={
            "step": number,
            "time_seconds": START_SECONDS + 10 + number * STEP_SECONDS,
            "duration_seconds": np.full(steps, STEP_SECONDS),
            "loss": 9.0 * 0.98**number,
            "gradient_norm": np.full(steps, 1.0),
            "learning_rate": np.full(steps, 1e-3),
            "tokens": np.full(steps, 3000),
            "microbatch_size": np.full(steps, 2),
            "global_batch_size": np.full(steps, 2 * microbatches * data),
            "consumed_samples": 2.0 * microbatches * data * number,
        },
        stages={
            "step": np.array([row[0] for row in rows], dtype=np.int64),
            "replica": np.array([row[1] for row in rows], dtype=np.int64),
            "stage": np.array([row[2] for row in rows], dtype=np.int64),
            "forward_seconds": np.array([compute(*row[1:]) / 3 for row in rows], dtype=np.float64),
            "backward_seconds": np.array([compute(*row[1:]) * 2 / 3 for row in rows], dtype=np.float64),
            "tokens": np.full(len(rows), 3000),
            "peak_memory_bytes": np.array([(1 + row[2]) << 30 for row in rows], dtype=np.int64),
        },
        ranks={
            "rank": np.arange(world),
            "node": np.array([nodes[rank // ranks_per_node] for rank in range(world)]),
            "local_rank": np.arange(world) % ranks_per_node,
            "device": np.array([f"cpu-{rank}" for rank in range(world)]),
            "tensor_rank": np.arange(world) % tensor,
            "pipeline_rank": np.arange(world) // (tensor * data),
            "data_rank": np.arange(world) // tensor % data,
            "layers": np.array(
                [_span(rank // (tensor * data), layers // pipeline) for rank in range(world)], dtype=np.str_
            ),
            "parameters": np.full(world, 4_000_000),
        },
        events=(Event(START_SECONDS + 50, "checkpoint", "saved step 30"),),
    )
    return Profile(
        cluster="lab",
        job_id=42,
        user="ada",
        start_seconds=START_SECONDS,
        end_seconds=START_SECONDS + seconds,
        restart_count=0,
        expected_nodes=nodes,
        nodes=tuple(
            NodeProfile(
                node=node,
                start_seconds=START_SECONDS,
                end_seconds=START_SECONDS + seconds,
                sampler_period_seconds=PERIOD_SECONDS,
                devices=tuple(
                    _device(index * ranks_per_node + local, local, seconds)
                    for local in range(min(ranks_per_node, world - index * ranks_per_node))
                ),
                events=(Event(START_SECONDS + 2 + index, "sampler", "started"),),
            )
            for index, node in enumerate(nodes)
        ),
        training=training,
    )


def _span(stage, layers):
    return f"{stage * layers}-{(stage + 1) * layers - 1}"


def _device(rank, local, seconds):
    samples = int(seconds / PERIOD_SECONDS)
    time_seconds = START_SECONDS + PERIOD_SECONDS * (1 + np.arange(samples))
    return DeviceProfile(
        uuid=f"cpu-{rank}",
        kind="cpu",
        model="a processor",
        index=local,
        driver="",
        samples={
            "time_seconds": time_seconds,
            "utilization_ratio": 0.5 + 0.25 * np.sin(np.arange(samples) * math.pi / 8 + rank),
            "memory_used_bytes": np.full(samples, 400.0 * 2**20),
            "power_watts": np.full(samples, np.nan),
        },
        absent={"power_watts": "a processor's tasks have no power of their own"},
    )


def change(profile, *, training=None, attributes=None, steps=None, **fields):
    """The profile with other fields; `training`, `attributes` and `steps` change what is inside its training part."""
    part = profile.training
    if training or attributes or steps:
        part = dataclasses.replace(
            part,
            **{
                "attributes": part.attributes | (attributes or {}),
                "steps": part.steps | (steps or {}),
                **(training or {}),
            },
        )
    return dataclasses.replace(profile, **{"training": part, **fields})


@pytest.fixture
def profiles():
    """`make(...)` makes a profile, `change(profile, ...)` another from it."""

    class Profiles:
        make = staticmethod(make_profile)
        change = staticmethod(change)

    return Profiles


@pytest.fixture
def profile():
    """The run of the demonstration in round numbers: two nodes, TP2 x PP2, LM head on the last stage."""
    return make_profile()
