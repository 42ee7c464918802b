"""Which forms of gres.conf prove the order of slurmd's list, and that all others prove nothing."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_slurm.gresconf import GpuList, GresConfError, gres_list, read


@pytest.mark.parametrize(
    "text",
    [
        "AutoDetect=nvml",
        "autodetect = NVML  # of all nodes",
        "NodeName=g[1-4] AutoDetect=nvml",
        "NodeName=cpu1 AutoDetect=off\nAutoDetect=nvml",
        "NodeName=g2 AutoDetect=nvml\nAutoDetect=off",
        "AutoDetect=nvml\nName=gpu Type=h100",
        "NodeName=g2 AutoDetect=nvml Name=gpu",
        "AutoDetect=nvml\nNodeName=other Name=gpu File=/dev/nvidia0",
        "AutoDetect=nvml\nName=shard Count=8\nName=mps Count=400\nName=nic File=/dev/mlx5_0",
    ],
)
def test_where_slurmd_asks_nvml_the_order_is_the_drivers(text):
    assert gres_list(text, "g2") == GpuList()


@pytest.mark.parametrize(
    ("text", "minors"),
    [
        ("Name=gpu File=/dev/nvidia[0-3]", (0, 1, 2, 3)),
        ("Name=gpu File=/dev/nvidia[0-11]", tuple(range(12))),
        ("Name=gpu File=/dev/nvidia2,/dev/nvidia0,/dev/nvidia3", (2, 0, 3)),
        ("Name=gpu File=/dev/nvidia[3,0-1,2]", (3, 0, 1, 2)),
        ("Name=gpu File=/dev/nvidia[2-3],/dev/nvidia[0-1]", (2, 3, 0, 1)),
        (
            "NodeName=g2 Name=gpu Type=a File=/dev/nvidia3\nNodeName=g[1-2] Name=gpu Type=a File=/dev/nvidia1",
            (3, 1),
        ),
        # slurmd takes the lines for all nodes first.
        (
            "NodeName=g2 Name=gpu File=/dev/nvidia3\n"
            "Name=gpu File=/dev/nvidia2\nNodeName=g[1-2] Name=gpu\tFile=/dev/nvidia0",
            (2, 3, 0),
        ),
        ('nodename = g2  name = gpu \\\n file = "/dev/nvidia[1,0]" # of /dev/nvidia[0-7]', (1, 0)),
        ("# Name=gpu File=/dev/nvidia0 \\\nName=gpu File=/dev/nvidia1\n\n", (1,)),
        ("AutoDetect=off\nName=gpu File=/dev/nvidia1", (1,)),
        ("AutoDetect=nvml\nNodeName=g2 AutoDetect=off Name=gpu File=/dev/nvidia1", (1,)),
        ("Name=gpu Count=2 Cores=0-7 Links=0,-1 File=/dev/nvidia[1,0]", (1, 0)),
        ("Name=gpu File=/dev/dri/renderD[128-130]", (128, 129, 130)),
        ("Name=gpu File=/dev/nvidia1\nName=shard Count=8\nName=mps Count=100 File=/dev/nvidia1", (1,)),
        ("NodeName=g1 Name=gpu Type=b MultipleFiles=/dev/nvidia[0-1]\nName=gpu Type=a File=/dev/nvidia1", (1,)),
    ],
)
def test_where_it_does_not_the_order_is_that_of_the_files_as_written(text, minors):
    assert gres_list(text, "g2") == GpuList(minors)


@pytest.mark.parametrize(
    ("text", "because"),
    [
        ("", "no GPU of this node is in it"),
        ("NodeName=g1 Name=gpu File=/dev/nvidia0", "no GPU of this node is in it"),
        ("Name=gpu Count=4", "GPUs without File= and AutoDetect="),
        ("Name=gpu File=/dev/nvidia0\nName=gpu Count=1", "GPUs without File="),
        ("Name=gpu MultipleFiles=/dev/nvidia[0-1]", "multiplefiles=: the order is not known"),
        ("Name=gpu File=/dev/nvidia0 Flags=CountOnly", "flags=: the order is not known"),
        ("Name=gpu Type=a File=/dev/nvidia0\nName=gpu Type=b File=/dev/nvidia1", "several types"),
        ("Name=gpu Type=a File=/dev/nvidia0\nName=gpu File=/dev/nvidia1", "several types"),
        ("Name=gpu File=/dev/nvidia0\nName=gpu File=/dev/nvidia[0-1]", "stands there twice"),
        ("Name=gpu File=/dev/dri/card0", "/dev/dri/card0: what its number means is not known"),
        ("Name=gpu File=/dev/nvidia[00-03]", "/dev/nvidia00: what its number means"),
        ("Name=gpu File=/dev/nvidia[0-3", "is no node list"),
        ("AutoDetect=rsmi", "AutoDetect=rsmi: its order is not known"),
        ("AutoDetect=nvidia\nName=gpu File=/dev/nvidia0", "AutoDetect=nvidia"),
        ("AutoDetect=nvml\nName=gpu File=/dev/nvidia[0-3]", "AutoDetect=nvml with file="),
        ("AutoDetect=nvml\nName=gpu Cores=0-7", "AutoDetect=nvml with cores="),
        ("AutoDetect=nvml\nAutoDetect=off", "AutoDetect= stands there twice"),
        ("NodeName=g2 AutoDetect=nvml\nNodeName=g[1-3] AutoDetect=off", "AutoDetect= stands there twice"),
        ("AutoDetect=nvml Name=gpu", "not understood"),
        ("Name=gpu AutoDetect=nvml", "AutoDetect= has no effect there"),
        ("AutoDetect=nvml\ninclude more.conf", "include more.conf: not understood"),
        ("Name=gpu File=/dev/nvidia0 File=/dev/nvidia1", "file= stands there twice"),
        ("Name=gpu File = ", "not understood"),
        ("Name=GPU File=/dev/nvidia0", "slurmd knows gpu in small letters alone"),
        ("NodeName=g2 File=/dev/nvidia0", "names no GRES"),
        ("File=/dev/nvidia0 Name=gpu", "not understood"),
        ("NodeName=g[1-2]x,g2 Name=gpu File=/dev/nvidia0", "not understood"),
        ("NodeName=g[2-1] Name=gpu File=/dev/nvidia0", "is no node list"),
    ],
)
def test_what_is_not_plain_proves_nothing(text, because):
    with pytest.raises(GresConfError, match=because.replace("[", r"\[")):
        gres_list(text, "g2")


WORDS = ["AutoDetect=nvml", "AutoDetect=off", "NodeName=n1", "NodeName=n[1-2]", "NodeName=n2", "Name=gpu", "Name=shard"]
WORDS += ["File=/dev/nvidia0", "File=/dev/nvidia[2,1]", "Type=a", "Count=2", "Include x", "\\\n", "#", "\n", "\n", "\n"]


@given(st.one_of(st.text(), st.lists(st.sampled_from(WORDS)).map(" ".join)))
def test_any_text_proves_something_or_is_refused(text):
    try:
        minors = gres_list(text, "n1").minors
    except GresConfError:
        return
    assert minors or "AutoDetect=nvml" in text
    assert len(set(minors)) == len(minors)


@pytest.fixture
def slurm_conf(tmp_path):
    (tmp_path / "gres.conf").write_text("AutoDetect=nvml\n")
    return tmp_path / "slurm.conf"


def test_it_is_read_beside_slurm_conf_through_links(slurm_conf):
    assert read(slurm_conf, "n1") == GpuList()
    path = slurm_conf.with_name("gres.conf")
    path.rename(slurm_conf.with_name("shared.conf"))
    path.symlink_to("shared.conf")
    assert read(slurm_conf, "n1") == GpuList()


def test_what_another_user_could_have_written_is_not_believed(slurm_conf):
    slurm_conf.with_name("gres.conf").chmod(0o666)
    with pytest.raises(GresConfError, match="could have been written by another user"):
        read(slurm_conf, "n1")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a file away")
def test_what_belongs_to_another_user_is_not_believed(slurm_conf):
    os.chown(slurm_conf.with_name("gres.conf"), 1000, 1000)
    with pytest.raises(GresConfError, match=r"by another user \(1000, 0644\)"):
        read(slurm_conf, "n1")


def test_what_cannot_be_read_proves_nothing(slurm_conf):
    path = slurm_conf.with_name("gres.conf")
    for text, because in (("AutoDetect=rsmi", f"{path}: AutoDetect=rsmi"), (" " * (2 << 20), f"{path} is larger")):
        path.write_text(text)
        with pytest.raises(GresConfError, match=because):
            read(slurm_conf, "n1")
    path.unlink()
    with pytest.raises(GresConfError, match="No such file"):
        read(slurm_conf, "n1")
    os.mkfifo(path, 0o600)
    with pytest.raises(GresConfError, match="another user"):
        read(slurm_conf, "n1")


def test_gpus_that_stand_in_for_the_drivers_prove_nothing(slurm_conf):
    slurm_conf.with_name("fake_gpus.conf").touch()
    with pytest.raises(GresConfError, match="stands in for the driver"):
        read(slurm_conf, "n1")


DISCOVERING = """
import sys
from trimtab_slurm.attempt import Attempt
from trimtab_slurm.devices import discover

found = discover(Attempt("lab", 7, 0.0, "n1", "ann", 1000, 1000, 0, (), {"SLURM_JOB_GPUS": "1"}), sys.argv[1])
print(*[source.name for source in found.sources], *found.notes)
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("AutoDetect=nvml\n", "GPU-b"),
        ("NodeName=n1 Name=gpu File=/dev/nvidia[0-2]\n", "GPU-a"),
        (
            "",
            "the job's processes GPUs not known: 1 GPU held (1), not measured: 1: GPU-b in the driver's order, ",
        ),
    ],
)
def test_the_sampler_goes_by_it(nvml_stub, slurm_conf, text, found):
    turned = (("GPU-a", 1), ("GPU-b", 0), ("GPU-c", 2))
    nvml_stub.script(
        "".join(f"gpu {index} {uuid} {minor} 00000000:1{index}:00.0 H\n" for index, (uuid, minor) in enumerate(turned))
    )
    slurm_conf.with_name("gres.conf").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", DISCOVERING, nvml_stub.library],
        env={"SLURM_CONF": str(slurm_conf)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(found)
