"""What a real slurmd says to its prolog about GPUs, against what is recorded in data/resolve; and how it lists them.

Run by itself, as root and with slurm_plugin and wrapper on the path, it records the Slurm that is installed:
python3 tests/slurm_plugin/test_hook_environments.py > tests/slurm_plugin/data/resolve/environments-24.11.json
"""

import json
import re
import subprocess
import tempfile
import time
from pathlib import Path
from unittest import mock

import pytest

from trimtab import sandbox as boxes
from trimtab.sandbox import config, machine
from trimtab.sandbox.config import Places
from trimtab_slurm.gresconf import GresConfError, gres_list
from trimtab_slurm.nodelist import expand_nodes
from trimtab_slurm.profile import read as read_profile
from trimtab_slurm.resolve import VARIABLES

RECORDED = Path(__file__).parent / "data" / "resolve"
# What the driver of a node would tell slurmd to name its GPUs by. MIG instances by their uuid, and as older drivers do.
UUIDS = {
    "n3": [f"GPU-5fd4f087-86f3-7a43-b711-4771313afc5{number}" for number in range(4)],
    "n4": [
        "MIG-1c6a3f5e-9d2b-5e4f-8a7c-0b1d2e3f4a50",
        "MIG-1c6a3f5e-9d2b-5e4f-8a7c-0b1d2e3f4a51",
        "MIG-GPU-5fd4f087-86f3-7a43-b711-4771313afc51/1/0",
        "MIG-GPU-5fd4f087-86f3-7a43-b711-4771313afc51/2/0",
    ],
}
JOBS = {
    "one": ("n1", 1),
    "two-others": ("n1", 2),
    "no-gpu": ("n1", 0),
    "whole-node": ("n2", 4),
    "uuids": ("n3", 2),
    "two-other-uuids": ("n3", 2),
    "mig": ("n4", 2),
    "mig-of-older-driver": ("n4", 2),
    "render-nodes": ("n5", 2),
}
"""Environment -> node and GPUs of its job. They start in this order, and hold their GPUs until all have started."""


@pytest.mark.slurm
def test_a_prolog_sees_what_is_recorded(slurm_installed, box_directory):
    stored = RECORDED / f"environments-{slurm_version()}.json"
    if not stored.exists():
        pytest.skip(f"nothing is recorded of Slurm {slurm_version()}; the head of this file says how to")
    expected, seen = json.loads(stored.read_text())["environments"], record(box_directory)
    assert {case: sorted(variables) for case, variables in seen.items()} == {
        case: sorted(variables) for case, variables in expected.items()
    }
    for case, variables in seen.items():
        assert {name: variables[name] for name in VARIABLES if name in variables} == {
            name: expected[case][name] for name in VARIABLES if name in expected[case]
        }, case


@pytest.mark.slurm
@pytest.mark.parametrize(
    "text",
    [
        "Name=gpu File={}2,{}0,{}3,{}1",
        "Name=gpu File={}[3,0-1,2]",
        'NodeName = n[1-2],x1  name = gpu \\\n file = "{}[2-3],{}[0-1]" # {}[0-3]',
        "# \\\nName=gpu File={}2 # of {}[0-3] \\\nName=gpu File={}[1,0,3] \\ \n\n",
        "Name=gpu File={}3 Cores=1\nName=gpu File={}[2,0] Cores=0\nName=gpu File={}1 Cores=1",
        "NodeName=n1 Name=gpu File={}3,{}1\nName=gpu File={}2\nNodeName=n1 Name=gpu File={}0",
        "AutoDetect=nvml\nNodeName=n1 AutoDetect=off Name=gpu File={}[1,0,3,2]",
        "Name=shard Count=100 File={}1\nName=gpu File={}[2,0]\nName=gpu File={}[3,1]\nName=mps Count=100",
    ],
)
def test_slurmd_lists_gpus_in_the_order_of_files_that_is_read_from_gres_conf(slurmd_lists, tmp_path, text):
    text = text.replace("{}", f"{tmp_path}/nvidia")
    assert gres_list(text, "n1").minors == slurmd_lists(text)


@pytest.mark.slurm
@pytest.mark.parametrize(
    "text",
    ["AutoDetect=nvml", "NodeName=n[1-2] AutoDetect=nvml", "AutoDetect=nvml\nName=gpu Type=sim\nName=shard Count=100"],
)
def test_slurmd_lists_gpus_in_the_drivers_order_where_it_asks_the_driver(slurmd_lists, text):
    assert gres_list(text, "n1").minors == ()
    assert slurmd_lists(text, driver=(2, 0, 3, 1)) == (2, 0, 3, 1)


@pytest.mark.slurm
def test_slurmd_lists_gpus_of_several_types_in_the_order_of_slurm_conf(slurmd_lists, tmp_path):
    text = f"Name=gpu Type=b File={tmp_path}/nvidia[0-1]\nName=gpu Type=a File={tmp_path}/nvidia[2-3]"
    with pytest.raises(GresConfError, match="several types"):
        gres_list(text, "n1")
    assert slurmd_lists(text, gres="gpu:a:2,gpu:b:2") == (2, 3, 0, 1)
    assert slurmd_lists(text, gres="gpu:b:2,gpu:a:2") == (0, 1, 2, 3)


@pytest.fixture
def slurmd_lists(sandbox, tmp_path):
    """A function: the minor numbers of the GPUs /nvidia0 to 3 below the path, as a slurmd with some gres.conf lists
    them. `driver`: those that a driver has, in its order."""
    places, munge = Places(tmp_path), Places(sandbox.directory).munge_socket
    for number in range(4):
        machine.make_device(places.gpu(number), number)

    def listed(text, driver=(), gres="gpu:4"):
        (tmp_path / "gres.conf").write_text(text + "\n")
        if driver:
            found = [fake_gpu(places.gpu(minor), place) for place, minor in enumerate(driver)]
            (tmp_path / "fake_gpus.conf").write_text("\n".join(sorted(found)) + "\n")
        conf = config.slurm_conf(boxes.Spec(nodes=1, gpus=4), places, "localhost", (10000, 10001))
        others = "".join(f",{name}:100" for name in ("shard", "mps") if f"Name={name}" in text)
        conf = conf.replace("Gres=gpu:sim:4", f"Gres={gres}{others}").replace("=gpu\n", "=gpu,shard,mps\n")
        places.slurm_conf.write_text(conf.replace(str(places.munge_socket), str(munge)))
        (tmp_path / "cgroup.conf").write_text(config.CGROUP_CONF)
        command = [machine.find_binary("slurmd"), "-G", "-N", "n1"]
        environment = {"SLURM_CONF": str(places.slurm_conf)}
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        files = re.findall(r"Name=gpu .*?File=(\S+)", said.stdout + said.stderr)
        return tuple(int(name.rpartition("nvidia")[2]) for each in files for name in expand_nodes(each))

    return listed


@pytest.mark.slurm
def test_a_job_is_profiled_by_the_gpu_whose_file_it_holds(slurm_installed, box_directory, nvml_stub):
    """Where the driver's order is another, and the job holds one of three."""
    nvml_stub.script("gpu 0 GPU-a 1 - H\ngpu 1 GPU-b 0 - H\ngpu 2 GPU-c 2 - H\n")
    box, _ = boxes.up(box_directory, boxes.Spec(nodes=1, gpus=3, cpus=2))
    places = Places(box_directory)
    settings = places.node_config.read_text()
    places.node_config.write_text(settings.replace('library = ""', f'library = "{nvml_stub.library}"'))
    job_id = submit(box, "n1", 1, "sleep 1")
    deadline = time.monotonic() + 60
    while not (found := list((places.profiles / "sandbox" / job_id).glob("*.h5"))):
        assert time.monotonic() < deadline, "no profile within 60 s"
        time.sleep(0.05)
    (node,) = read_profile(found[0]).nodes
    assert [device.uuid for device in node.devices] == ["GPU-b"]


def slurm_version():
    """Of the Slurm that is installed: 24.11."""
    said = subprocess.run([machine.find_binary("slurmd"), "-V"], capture_output=True, text=True, check=True).stdout
    return re.search(r"\d+\.\d+", said)[0]


def record(directory):
    """The environment of the prolog of each of JOBS, in a sandbox of its own. None of them tells who recorded it."""
    with mock.patch.object(config, "gres_conf", write_gres_conf):
        box, _ = boxes.up(directory, boxes.Spec(nodes=5, gpus=4, cpus=8))
    prolog = Places(directory).hook("prolog")
    # The shell's own environment adds to what slurmd gave it; the kernel's view does not.
    prolog.write_text(f"#!/bin/sh\n/bin/cat /proc/$$/environ > {directory}/$SLURM_JOB_ID.environ\n")
    submitted = {case: submit(box, *job) for case, job in JOBS.items()}
    try:
        return {case: read(directory, job_id) for case, job_id in submitted.items()}
    finally:
        boxes.down(directory)


def submit(box, node, gpus, script="exec sleep 300"):
    wanted = [f"--gres=gpu:{gpus}"] if gpus else []
    return subprocess.run(
        [
            "sbatch",
            "--parsable",
            "--uid=nobody",
            "--gid=nogroup",
            "--chdir=/",
            "--output=/dev/null",
            f"--nodelist={node}",
            *wanted,
        ],
        input=f"#!/bin/sh\n{script}\n",
        env=box.environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def read(directory, job_id):
    """A job's prolog's environment, once it ran."""
    path = directory / f"{job_id}.environ"
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_bytes().endswith(b"\0")):
        assert time.monotonic() < deadline, f"no prolog of job {job_id} within 60 s"
        time.sleep(0.05)
    text = path.read_text().replace(str(directory), "/etc/slurm")
    return dict(variable.split("=", 1) for variable in sorted(text.split("\0")) if variable)


def write_gres_conf(spec, places):
    """gres.conf for nodes whose GPUs are files, but n3's and n4's, which slurmd takes for a driver's, with uuids.

    Slurm's own tests let slurmd find GPUs that do not exist by such a fake_gpus.conf.
    """
    names = {node: [f"{node}-nvidia{number}" for number in range(4)] for node in spec.node_names}
    names["n5"] = [f"renderD{128 + number}" for number in range(4)]
    found = []
    for node, files in names.items():
        for number, name in enumerate(files):
            machine.make_device(places.directory / name, number)
            if node in UUIDS:
                found.append(fake_gpu(places.directory / name, number, UUIDS[node][number]))
    (places.directory / "fake_gpus.conf").write_text("\n".join(found) + "\n")
    lines = []
    for node, files in names.items():
        paths = ",".join(str(places.directory / name) for name in files)
        lines.append(f"NodeName={node} Name=gpu Type={spec.gpu_type} File={paths}\n")
    return "".join(lines)


def fake_gpu(path, place, uuid="(null)"):
    """A line of fake_gpus.conf: one of a driver's four GPUs."""
    links = ",".join("-1" if other == place else "0" for other in range(4))
    return f"sim|8|0-7|{links}|{path}|{uuid}|nvidia_gpu_env"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="trimtab-") as name:
        Path(name).chmod(0o755)
        environments = record(Path(name))
    lines = [f"  {json.dumps(case)}: {json.dumps(variables)}" for case, variables in environments.items()]
    print(f'{{"source": "recorded from prologs of Slurm {slurm_version()}",\n "environments": {{')
    print(",\n".join(lines), "}}", sep="\n")
