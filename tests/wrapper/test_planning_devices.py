import numpy as np
import pytest

from trimtab.balance.model.accelerators import ACCELERATORS
from trimtab.planning.devices import accelerator_of
from trimtab_slurm.contents import DeviceProfile


def device(model, kind="gpu"):
    return DeviceProfile("GPU-0", kind, model, 0, "", {"time_seconds": np.zeros(0)})


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("A100-SXM4-40GB", "a100-40"),  # older drivers leave the vendor out
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_an_accelerator_is_known_by_what_its_driver_calls_it(model, name):
    assert accelerator_of([device(model), device(model)]) is ACCELERATORS[name]


@pytest.mark.parametrize(
    "model",
    [
        "NVIDIA A100-PCIE-40GB",
        "NVIDIA A100 80GB PCIe",
        "NVIDIA RTX A1000",
        "NVIDIA GH200 480GB",
        "NVIDIA GB200",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "AMD Instinct MI300A",
        "",
    ],
)
def test_others_of_its_family_are_not_known(model):
    assert accelerator_of([device(model)]) is None


def test_slices_mixtures_and_nothing_are_not_known():
    assert accelerator_of([device("NVIDIA H100 80GB HBM3", "mig")]) is None
    assert accelerator_of([device("NVIDIA H100 80GB HBM3"), device("NVIDIA A100-SXM4-40GB")]) is None
    assert accelerator_of([device("NVIDIA H100 80GB HBM3"), device("Intel Xeon", "cpu")]) is None
    assert accelerator_of([]) is None


def test_processes_of_a_task_are_a_cpu():
    assert accelerator_of([device("Intel Xeon", "cpu"), device("AMD EPYC", "cpu")]) is ACCELERATORS["cpu"]
