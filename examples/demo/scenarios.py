"""What can be demonstrated on a real Slurm on this machine, and the program that does it: make demo SCENARIO=noise.

A scenario is a job, faults that its ranks make up themselves (TRIMTAB_INJECT), and what is done to it from outside
while it trains. The tests run the same ones.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trimtab import sandbox as boxes
from trimtab.outcome import ExitCode
from trimtab.sandbox import processes
from trimtab.sandbox.config import Places
from trimtab.sandbox.lifecycle import signals_raise

EXAMPLES = Path(__file__).parents[1]
LONGEST_SECONDS = 600.0
"""For which anything that a scenario waits for is waited for."""


class Run:
    """A job that was submitted into a sandbox, and is followed to its end."""

    def __init__(self, sandbox: Path, directory: Path, scenario: "Scenario", output: int | None = None) -> None:
        """`output`: the file descriptor that gets what `trimtab submit` prints; None: this process's own."""
        found = boxes.find(sandbox)
        assert found is not None
        self.sandbox, self.directory, self.environment = sandbox, directory, found.environment
        job = EXAMPLES / scenario.job
        for file in (job, *job.parent.glob("*.py")):
            shutil.copy(file, directory)
        self._following = subprocess.Popen(
            [
                *(sys.executable, "-m", "trimtab", "submit", job.name, "--template", "cpu-demo", "--follow"),
                *(f"--nodes={scenario.nodes}", f"--gpus-per-node={scenario.ranks_per_node}"),
                f"--time={scenario.time_limit}",
            ],
            cwd=directory,
            env={**self.environment, "TRIMTAB_INJECT": scenario.inject},
            stdout=output,
            stderr=output,
        )

    @property
    def text(self) -> str:
        """What the job has written so far."""
        return "".join(file.read_text(errors="replace") for file in self.directory.glob("trimtab-*.out"))

    @property
    def job_id(self) -> int:
        """Of the job; it must have been submitted."""
        (file,) = self.directory.glob("trimtab-*.out")
        return int(file.stem.removeprefix("trimtab-"))

    @property
    def step(self) -> int:
        """The last step that was told of."""
        return max((int(number) for number in re.findall(r"^step +(\d+)/", self.text, re.MULTILINE)), default=0)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition. Raises RuntimeError when the job ends before, or it takes too long."""
        deadline = time.monotonic() + LONGEST_SECONDS
        while not condition():
            if self._following.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"waited in vain for {what}")
            time.sleep(0.1)

    def until_step(self, step: int) -> None:
        """Wait until a step was told of."""
        self.until(lambda: self.step >= step, f"step {step}")

    def until_told(self, pattern: str) -> None:
        """Wait until the job's output holds a pattern."""
        self.until(lambda: re.search(pattern, self.text) is not None, f"{pattern!r} in the job's output")

    def slurm(self, *command: str) -> str:
        """What one of Slurm's commands answers."""
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True).stdout

    def node_states(self) -> dict[str, str]:
        """Node -> state as Slurm spells it."""
        found = boxes.find(self.sandbox)
        return boxes.node_states(found) if found else {}

    def wrapper(self) -> int:
        """Process id of `trimtab run`: of the two that there are the one whose parent, the other, outlives it."""
        running = {}
        for process in processes.on_nodes(Places(self.sandbox)):
            proc = Path(f"/proc/{process.pid}")
            if b"\0trimtab\0run\0" in (proc / "cmdline").read_bytes():
                running[process.pid] = int((proc / "stat").read_text().rpartition(")")[2].split()[1])  # its parent
        return min(pid for pid, parent in running.items() if parent in running)

    def stop(self) -> None:
        """Follow it no longer; the job itself ends with its sandbox."""
        self._following.kill()
        self._following.wait()

    def end(self) -> int:
        """Wait for the job's end and its report; the exit code of `trimtab submit --follow`."""
        return self._following.wait(LONGEST_SECONDS)


@dataclass(frozen=True)
class Scenario:
    """One demonstration."""

    job: str
    """The job file, below examples/."""
    expect: str
    """What there is to see."""
    nodes: int = 2
    """Of the job."""
    ranks_per_node: int = 1
    spare_nodes: int = 0
    """Further nodes of the sandbox."""
    inject: str = ""
    """Faults that the ranks make up."""
    time_limit: str = "0:15:00"
    act: Callable[[Run], None] = lambda run: None
    """What is done to the job from outside while it trains."""
    cancelled: bool = False
    """Whether `act` cancels the job in the end."""

    def sandbox(self, profiles: Path | None = None) -> boxes.Spec:
        """The sandbox that it needs; `profiles`: where profiles shall outlive it."""
        return boxes.Spec(
            nodes=self.nodes + self.spare_nodes, gpus=self.ranks_per_node, profiles=str(profiles) if profiles else ""
        )


def leave_when_settled(run: Run) -> None:
    """Cancel the job once it has trained on without the slow node for a while: it was made to be a long one."""
    run.until_told(r"trimtab: job \d+, .* on n1, n3")
    run.until_step(run.step + 60)
    run.slurm("scancel", str(run.job_id))


def preempt(run: Run) -> None:
    """Submit a job that is more urgent and needs all nodes, for a few seconds."""
    run.until_step(80)
    whole = [f"--nodes={len(run.node_states())}", "--exclusive", "--partition=urgent"]
    run.slurm("sbatch", *whole, "--job-name=urgent", "--output=/dev/null", "--wrap=sleep 3")


def shorten(run: Run) -> None:
    """Let the job's time limit come within a minute, once, and take back the change when it has been warned of it."""
    run.until_step(80)
    minutes = int(run.slurm("squeue", "--noheader", "--format=%M", f"--jobs={run.job_id}").split(":")[0])
    run.slurm("scontrol", "update", f"JobId={run.job_id}", f"TimeLimit={minutes + 1}")
    run.until_told("SIGUSR1")
    run.slurm("scontrol", "update", f"JobId={run.job_id}", "TimeLimit=15")


def crash(run: Run) -> None:
    """Kill the wrapper, then the controller for a while, then a node until the job goes on without it."""
    run.until_step(130)
    os.kill(run.wrapper(), signal.SIGKILL)
    run.until_step(170)
    boxes.kill(run.sandbox, "slurmctld")
    run.until_step(200)
    boxes.restart(run.sandbox, "slurmctld")
    run.until_step(230)
    boxes.kill(run.sandbox, "n2")
    run.until_told(r"trimtab: job \d+, .* on n1, n3")
    boxes.restart(run.sandbox, "n2")


SCENARIOS = {
    "intrinsic": Scenario(
        job="demo/intrinsic.toml",
        expect="the LM head makes the last stage slow: layers move to the first one, and steps get faster",
    ),
    "hardware": Scenario(
        job="demo/hardware.toml",
        expect="a restart shows what one takes; then node n2 becomes slow: once that has cost as much, the job is "
        "requeued without it",
        spare_nodes=1,
        inject="kill:rank=1,step=12,attempt=0;slow:node=n2,from_step=30,factor=3",
        time_limit="8:00:00",
        act=leave_when_settled,
        cancelled=True,
    ),
    "fewer": Scenario(
        job="demo/fewer.toml",
        expect="a restart shows what one takes; then node n2 becomes slow, and there is no other: the job gives it "
        "back, and goes on with the two that are left",
        nodes=3,
        inject="kill:rank=1,step=12,attempt=0;slow:node=n2,from_step=30,factor=4",
        time_limit="8:00:00",
        act=leave_when_settled,
        cancelled=True,
    ),
    "no-spare": Scenario(
        job="demo/replicas.toml",
        expect="node n2 becomes slow at step 30, and there is no other: microbatches move to n1",
        inject="slow:node=n2,from_step=30,factor=1.8",
    ),
    "data": Scenario(
        job="uneven/job.toml",
        expect="samples are of uneven length: no layer moves, repacking is asked for",
        ranks_per_node=2,
    ),
    "noise": Scenario(
        job="demo/noise.toml",
        expect="now and then a step of one rank takes five times as long: nothing is done in 500 steps",
        inject="outlier:probability=0.02,factor=5",
    ),
    "preemption": Scenario(
        job="demo/restarts.toml",
        expect="an urgent job takes the nodes: the job saves, waits, and goes on where it was",
        act=preempt,
    ),
    "time-limit": Scenario(
        job="demo/restarts.toml",
        expect="the time limit comes near: the job saves before it, has itself requeued, and goes on where it was",
        act=shorten,
    ),
    "hang": Scenario(
        job="demo/restarts.toml",
        expect="a rank hangs: it is named, with the stacks of all, and the job goes on from its last checkpoint",
        inject="hang:rank=1,step=70,attempt=0",
    ),
    "crash": Scenario(
        job="demo/restarts.toml",
        expect="ranks are killed during a reshape, during a save and between two steps, then the wrapper, Slurm's "
        "controller and a whole node: the job goes on from its last checkpoint each time",
        spare_nodes=1,
        inject="kill:rank=1,during=reshape,attempt=0;kill:rank=0,during=save,step=55,attempt=1;"
        "kill:rank=1,step=105,attempt=2",
        act=crash,
    ),
}


def main(name: str) -> int:
    """Run a scenario in the current directory, or list them all ("?").

    Returns the exit code of its job, 0 where the scenario cancels it; 2 when there is no such scenario.
    """
    if name not in SCENARIOS:
        listing = sys.stdout if name == "?" else sys.stderr
        print("scenarios:" if name == "?" else f"trimtab: there is no scenario {name!r}; choose from:", file=listing)
        for choice, scenario in SCENARIOS.items():
            print(f"  {choice:12}{scenario.expect}", file=listing)
        return 0 if name == "?" else 2
    scenario = SCENARIOS[name]
    print(f"{name}: {scenario.expect}\n", flush=True)
    with signals_raise(), tempfile.TemporaryDirectory(prefix="trimtab-") as directory:
        sandbox = Path(directory)
        sandbox.chmod(0o755)  # munged wants all users to reach its socket
        try:
            boxes.up(sandbox, scenario.sandbox(Path("profiles").absolute()))
            run = Run(sandbox, Path.cwd(), scenario)
            try:
                scenario.act(run)
                code = run.end()
                if scenario.cancelled:
                    print("\nThe job would have gone on for hours: the demonstration has cancelled it.")
                return 0 if scenario.cancelled and code == ExitCode.STOPPED else code
            finally:
                run.stop()
        except (boxes.SandboxError, RuntimeError) as error:
            print(f"trimtab: {error}", file=sys.stderr)
            return 2
        finally:
            boxes.down(sandbox)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
