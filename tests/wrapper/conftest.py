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


def resumed(profile, *, first_step, start, restart_count, offset=0.0):
    """The profile as a later attempt that began so many seconds after it, at a step; its losses are `offset` higher."""
    part = profile.training
    later = start - (first_step - 1) * STEP_SECONDS
    kept, kept_stages = part.steps["step"] >= first_step, part.stages["step"] >= first_step
    steps = {name: column[kept] for name, column in part.steps.items()}
    steps |= {"time_seconds": steps["time_seconds"] + later, "loss": steps["loss"] + offset}
    training = dataclasses.replace(
        part,
        start_seconds=part.start_seconds + start,
        end_seconds=part.end_seconds + later,
        steps=steps,
        stages={name: column[kept_stages] for name, column in part.stages.items()},
        events=(),
    )
    nodes = [
        _moved(node, start, part.end_seconds + later + 1 - profile.start_seconds - start) for node in profile.nodes
    ]
    return dataclasses.replace(
        profile,
        start_seconds=profile.start_seconds + start,
        end_seconds=part.end_seconds + later + 1,
        restart_count=restart_count,
        nodes=tuple(nodes),
        training=training,
    )


def _moved(node, start, seconds):
    devices = []
    for device in node.devices:
        kept = device.samples["time_seconds"] <= START_SECONDS + seconds
        samples = {name: column[kept] for name, column in device.samples.items()}
        samples["time_seconds"] = samples["time_seconds"] + start
        devices.append(dataclasses.replace(device, samples=samples))
    return dataclasses.replace(
        node,
        start_seconds=node.start_seconds + start,
        end_seconds=node.start_seconds + start + seconds,
        devices=tuple(devices),
        events=(),
    )


def until(profile, last_step, exit_code, outcome):
    """The profile as if it had ended with a step."""
    part = profile.training
    kept, kept_stages = part.steps["step"] <= last_step, part.stages["step"] <= last_step
    steps = {name: column[kept] for name, column in part.steps.items()}
    end = float(steps["time_seconds"][-1]) + 2
    training = dataclasses.replace(
        part,
        end_seconds=end - 1,
        attributes=part.attributes | {"exit_code": exit_code, "outcome": outcome},
        steps=steps,
        stages={name: column[kept_stages] for name, column in part.stages.items()},
    )
    nodes = [_moved(node, 0.0, end - profile.start_seconds) for node in profile.nodes]
    return dataclasses.replace(profile, end_seconds=end, nodes=tuple(nodes), training=training)


def trimmed(profile, *, step, factor=0.8):
    """The profile as if a layer had moved from the last stage to the first before a step, and an order had said so."""
    part = profile.training
    after, after_stages = part.steps["step"] >= step, part.stages["step"] >= step
    duration = np.where(after, STEP_SECONDS * factor, STEP_SECONDS)
    stages = dict(part.stages)
    moved = np.where(stages["stage"] == 0, LAYER_SECONDS, -LAYER_SECONDS) * after_stages
    stages["forward_seconds"] = stages["forward_seconds"] + moved / 3
    stages["backward_seconds"] = stages["backward_seconds"] + moved * 2 / 3
    settings = {
        "step": np.array([int(part.steps["step"][0]), step]),
        "layout": np.array(["Etttt|ttttL", "Ettttt|tttL"]),
        "microbatches": np.array(["8", "8"]),
        "recomputed_layers": np.array(["0|0", "0|1"]),
    }
    orders = {
        "number": np.array([1, 2]),
        "step": np.array([step, step + 5]),
        "time_seconds": np.array([START_SECONDS + 30, START_SECONDS + 40]),
        "kind": np.array(["move layers", "move microbatches"]),
        "before": np.array(["4|4", "8"]),
        "after": np.array(["5|3", ""]),
        "reason": np.array(["stage 1 takes 17.2% longer than the median stage", "there is one replica"]),
        "before_seconds": np.array([1.5, np.nan]),
        "predicted_seconds": np.array([1.18, np.nan]),
        "measured_seconds": np.array([1.2, np.nan]),
        "cost_seconds": np.array([0.25, np.nan]),
        "moved_bytes": np.array([3.0 * 2**20, np.nan]),
        "outcome": np.array(["carried out", "refused: 8 microbatches do not fit"]),
    }
    return change(
        profile,
        steps={"duration_seconds": duration},
        training={"stages": stages, "settings": settings, "orders": orders},
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
    """`make(...)` makes a profile, the others another from it."""

    class Profiles:
        make = staticmethod(make_profile)
        change = staticmethod(change)
        resumed = staticmethod(resumed)
        trimmed = staticmethod(trimmed)
        until = staticmethod(until)

    return Profiles


@pytest.fixture
def profile():
    """The run of the demonstration in round numbers: two nodes, TP2 x PP2, LM head on the last stage."""
    return make_profile()


@pytest.fixture(scope="session")
def plain_training():
    """Its training part alone, for properties: it is never changed."""
    return make_profile().training
