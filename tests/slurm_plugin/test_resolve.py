"""Which devices an attempt holds."""

import dataclasses
import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_slurm.admin.inventory import read_inventory
from trimtab_slurm.attempt import from_hook
from trimtab_slurm.gresconf import GpuList, GresConfError, gres_list
from trimtab_slurm.resolve import InventoryDevice, held, resolve

DATA = Path(__file__).parent / "data" / "resolve"
ENVIRONMENTS = {
    path.stem.removeprefix("environments-"): json.loads(path.read_text())["environments"]
    for path in sorted(DATA.glob("environments-*.json"))
}
INVENTORIES = json.loads((DATA / "inventories.json").read_text())
CASES = tomllib.loads((DATA / "cases.toml").read_text())["case"]


def environment_of(case, version):
    changed = ENVIRONMENTS[version][case["environment"]] | case.get("changes", {})
    return {name: value for name, value in changed.items() if value != "-"}


def gres_list_or_none(text, node):
    try:
        return gres_list(text, node)
    except GresConfError:
        return None


@pytest.mark.parametrize("version", ["22.05", "24.11", "25.11", "26.05"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_every_case_has_its_answer(tmp_path, case, version):
    inventory = tmp_path / "inventory.json"
    inventory.write_text(json.dumps(INVENTORIES[case["inventory"]]))
    devices = read_inventory(inventory)
    attempt = from_hook(environment_of(case, version), 0.0)
    answer = resolve(attempt.gpu_variables, devices, gres_list_or_none(case.get("gres_conf", ""), attempt.node))
    if "devices" in case:
        expected = tuple(devices[place].uuid for place in case["devices"])
        assert (answer.status, set(answer.devices), len(answer.devices)) == ("resolved", set(expected), len(expected))
    else:
        assert (answer.status, answer.devices) == ("unknown", ())
        assert case["because"] in answer.reason
    # The node by its name in Slurm, whatever the host is called; the hardware has no say in what is held.
    assert attempt.node in {"n1", "n2", "n3", "n4", "n5"}


@pytest.mark.parametrize(
    ("environment", "gpus"),
    [
        ({}, ()),
        ({"SLURM_JOB_GPUS": ""}, None),
        ({"SLURM_JOB_GPUS": " ", "CUDA_VISIBLE_DEVICES": "0"}, None),
        ({"SLURM_JOB_GPUS": "0,1,1"}, ("0", "1")),
        ({"SLURM_JOB_GPUS": "0-2,5"}, ("0", "1", "2", "5")),
        ({"SLURM_JOB_GPUS": "0,5-2"}, None),
        ({"SLURM_JOB_GPUS": "128"}, ("128",)),
        ({"SLURM_JOB_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "0"}, ("0", "1")),
        ({"SLURM_JOB_GPUS": "", "CUDA_VISIBLE_DEVICES": "GPU-5c1a-8,MIG-77-0"}, ("GPU-5c1a-8", "MIG-77-0")),
        ({"SLURM_JOB_GPUS": "0", "CUDA_VISIBLE_DEVICES": "GPU-5c1a-8,gpu-5C1A-8"}, ("GPU-5c1a-8",)),
        ({"SLURM_JOB_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "GPU-5c1a-8"}, None),
        ({"SLURM_JOB_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "MIG-77-0,1"}, None),
        ({"CUDA_VISIBLE_DEVICES": "GPU-5c1a-8", "ROCR_VISIBLE_DEVICES": "GPU-5c1a-9"}, None),
        ({"CUDA_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "1"}, None),
        ({"SLURM_JOB_GPUS": "0", "ZE_AFFINITY_MASK": "0.1"}, ("0",)),
        ({"ROCR_VISIBLE_DEVICES": "3"}, ("3",)),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "GPU"}, None),
        ({"SLURM_JOB_GPUS": ","}, None),
    ],
)
def test_held_gpus_are_spelled_as_slurm_does(environment, gpus):
    assert held(environment) == gpus


def test_an_order_that_is_not_known_proves_nothing():
    one, other = InventoryDevice("GPU-a", index=0), InventoryDevice("GPU-b", index=1)
    assert resolve({"SLURM_JOB_GPUS": "0"}, [one, other]).reason.startswith("the driver does not say a minor number")
    assert resolve({"SLURM_JOB_GPUS": "0,1"}, [one, other]).devices == ("GPU-a", "GPU-b")


def test_an_order_of_the_bus_that_is_not_the_drivers_proves_nothing():
    one, other = InventoryDevice("GPU-a", 0, 0, "0000:9a:00.0"), InventoryDevice("GPU-b", 1, 1, "0000:1B:00.0")
    assert (
        "GPU-a in the driver's order, GPU-b in the order on the PCI bus"
        in resolve({"SLURM_JOB_GPUS": "0"}, [one, other]).reason
    )
    # As numbers: a domain may be written with four digits or eight.
    later = dataclasses.replace(other, pci="00000001:02:00.0")
    assert resolve({"SLURM_JOB_GPUS": "0"}, [one, later]).devices == ("GPU-a",)


def test_files_name_gpus_of_a_driver_that_does_not_say_its_order():
    one, other = InventoryDevice("GPU-a", minor=1), InventoryDevice("GPU-b", minor=0)
    assert resolve({"SLURM_JOB_GPUS": "0"}, [one, other], GpuList((1, 0))).devices == ("GPU-a",)
    answer = resolve({"SLURM_JOB_GPUS": "0"}, [one, other], GpuList())
    assert answer.reason.startswith("the driver does not say an index")


def test_what_it_was_concluded_from_is_said():
    turned = [InventoryDevice("GPU-a", 0, 1), InventoryDevice("GPU-b", 1, 0), InventoryDevice("GPU-c", 2, 2)]
    straight = [dataclasses.replace(device, minor=device.index) for device in turned]
    for inventory, gpus, reason in (
        (straight, None, "places in slurmd's list, whatever its order"),
        (turned, GpuList(), "places in slurmd's list, by the driver's order"),
        (turned, GpuList((0, 1, 2)), "places in gres.conf's list of device files"),
    ):
        assert resolve({"SLURM_JOB_GPUS": "1"}, inventory, gpus).reason == reason


def test_a_gpu_and_its_instance_are_different_devices():
    gpu = InventoryDevice("GPU-a", 0, 0)
    instances = [InventoryDevice(f"MIG-{name}", parent_uuid="GPU-a") for name in "bc"]
    assert resolve({"CUDA_VISIBLE_DEVICES": "GPU-a"}, [gpu, *instances]).devices == ("GPU-a",)
    assert resolve({"CUDA_VISIBLE_DEVICES": "MIG-c"}, [gpu, *instances]).devices == ("MIG-c",)
    # An old driver's name needs the instances' ids, which are not known here.
    assert resolve({"CUDA_VISIBLE_DEVICES": "MIG-GPU-a/1/0"}, [gpu, *instances]).status == "unknown"


@st.composite
def inventories(draw):
    """GPUs as a driver has them: any minor numbers, from any first one on, addresses in any order, or not known; some
    split into instances, some lost."""
    count = draw(st.integers(0, 8))
    first = draw(st.sampled_from([0, 1, 128]))
    minors = draw(st.permutations([first + number for number in range(count + 2)]))[:count]
    buses = draw(st.permutations(range(count)))
    known = draw(st.booleans())
    whole = [
        InventoryDevice(f"GPU-{index}", index, minors[index], f"00000000:{buses[index]:02X}:00.0" if known else "")
        for index in range(count)
    ]
    split = draw(st.integers(0, count)) if draw(st.booleans()) else 0
    instances = [
        InventoryDevice(f"MIG-{parent.uuid[4:]}-{number}", number, None, parent.pci, parent.uuid, number + 1, 0)
        for parent in whole[:split]
        for number in range(draw(st.integers(1, 3)))
    ]
    lost = draw(st.sets(st.integers(0, 8), max_size=2))
    return [*(device for device in whole if device.index not in lost), *instances]


@st.composite
def variables(draw, inventory):
    """What a slurmd, or a broken one, could say."""
    number = st.integers(0, 140).map(str)
    name = st.sampled_from([device.uuid for device in inventory] or ["GPU-x"])
    value = st.one_of(
        st.lists(number, max_size=5).map(",".join), st.lists(name, max_size=5).map(",".join), st.text(max_size=8)
    )
    keys = ["SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"]
    return draw(st.dictionaries(st.sampled_from(keys), value))


@st.composite
def gpu_lists(draw, inventory):
    """What gres.conf can prove, of these GPUs or of others."""
    minors = st.sampled_from([device.minor for device in inventory if device.minor is not None] + [0, 7, 131])
    return draw(st.none() | st.builds(GpuList, st.lists(minors, unique=True, max_size=8).map(tuple)))


@given(st.data())
def test_a_resolved_device_is_one_of_the_inventory_and_the_inventorys_order_does_not_matter(data):
    inventory = data.draw(inventories())
    environment = data.draw(variables(inventory))
    gpus = data.draw(gpu_lists(inventory))
    answer = resolve(environment, inventory, gpus)
    assert set(answer.devices) <= {device.uuid for device in inventory}
    assert len(set(answer.devices)) == len(answer.devices)
    assert resolve(environment, data.draw(st.permutations(inventory)), gpus) == answer
    ids = held(environment)
    assert answer.status == "unknown" or (ids is not None and len(answer.devices) <= len(ids))


@given(st.data())
def test_jobs_that_hold_different_ids_share_no_device(data):
    inventory = data.draw(inventories())
    # One slurmd names all GPUs in one way: by place, by the number of the file, or by uuid.
    names = data.draw(
        st.sampled_from(
            [
                [str(place) for place in range(len(inventory))],
                [str(device.minor) for device in inventory if device.minor is not None],
                [device.uuid for device in inventory],
            ]
        )
    )
    split = data.draw(st.lists(st.sampled_from([0, 1, 2]), min_size=len(names), max_size=len(names)))
    gpus = data.draw(gpu_lists(inventory))
    answers = [
        resolve(
            {"SLURM_JOB_GPUS": ",".join(name for name, owner in zip(names, split, strict=True) if owner == job)},
            inventory,
            gpus,
        )
        for job in (0, 1)
    ]
    assert not set(answers[0].devices) & set(answers[1].devices)
