"""What a decision takes: each kind of candidate, on pipelines of several sizes with one slow place.

    .venv/bin/python benchmarks/decide.py

Layers, speeds and links are made up. Prints; asserts nothing.
"""

import math
import time

import click
import numpy as np

from trimtab.balance.deciding.candidates import candidates
from trimtab.balance.deciding.decide import weigh
from trimtab.balance.deciding.ledger import Ledger
from trimtab.balance.deciding.situation import Fault, Situation
from trimtab.balance.plan import Costs, Hardware, Link, ParameterMemory, Part, Plan, Schedule
from trimtab.protocol import Balance, Layout, Shape

SIZES = ((8, 2, 1, 8), (32, 4, 4, 16), (64, 8, 8, 32), (128, 16, 8, 32))


@click.command()
def main() -> None:
    """Print CPU seconds of the candidates, and the decision."""
    print(f"{'layers':>7}{'stages':>7}{'replicas':>9}{'microbatches':>13}{'seconds':>9}  decision")
    for size in SIZES:
        situation = made_up(*size)
        began = time.process_time()
        decision = weigh(candidates(situation), situation, Balance(), Ledger())
        seconds = time.process_time() - began
        layers, stages, replicas, microbatches = size
        print(f"{layers:7}{stages:7}{replicas:9}{microbatches:13}{seconds:9.2f}  {decision.reason}")


def made_up(layers: int, stages: int, replicas: int, microbatches: int) -> Situation:
    """Layers apart by 10 %, a head of three, devices apart by 3 %, and one at 0.7."""
    random = np.random.default_rng(0)
    seconds = 0.01 * random.uniform(0.9, 1.1, layers)
    speeds = random.uniform(0.97, 1.0, (replicas, stages))
    slow = replicas - 1, stages // 2
    speeds[slow] = 0.7
    return Situation(
        costs=Costs(
            layers=tuple(Part(each, each, each, 1e6, 100.0, 10.0) for each in seconds),
            embedding=Part(0.0, 0.0, 0.0, 1e7, 0.0, 0.0),
            head=Part(0.03, 0.03, 0.03, 1e7, 0.0, 0.0),
            boundary_bytes=1e6,
        ),
        memory=ParameterMemory(2.0, 4.0, 12.0),
        hardware=Hardware(speeds, (math.inf,) * stages, (Link(1e-5, 1e10),) * stages),
        plan=Plan(Layout.uniform(layers, stages), Schedule.ONE_F_ONE_B, (microbatches,) * replicas, (0,) * stages),
        shape=Shape(1, stages, replicas),
        triggered=True,
        fault=Fault("hardware", (slow,)),
        seconds_left=1e5,
    )


if __name__ == "__main__":
    main()
