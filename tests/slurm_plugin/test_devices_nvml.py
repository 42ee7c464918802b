"""NVIDIA GPUs, by the real nvidia-ml-py over a stub of the library. It keeps global state: a process for each test."""

import json
import math
import subprocess
import sys

import pytest

from trimtab_slurm.devices import figures
from trimtab_slurm.devices.nvml_events import XIDS
from trimtab_slurm.devices.nvml_readers import FIRST

WATCHER = """
import json, sys, types
from trimtab_slurm.attempt import Attempt
from trimtab_slurm.devices import DeviceError, discover, nvml, nvml_readers

now = 0.0
nvml.time = nvml_readers.time = types.SimpleNamespace(monotonic=lambda: now)
library, variables = sys.argv[1], json.loads(sys.argv[2])
found = discover(Attempt("lab", 7, 0.0, "n1", "ann", 1000, 1000, 0, (), variables), library)
print(json.dumps([[source.name for source in found.sources], found.notes]), flush=True)
for line in sys.stdin:
    now = float(line)
    answer = {}
    for source in found.sources:
        try:
            for device in source.devices():
                reading = device.sample()
                answer[device.identity.uuid] = vars(reading) | {"identity": vars(device.identity)}
        except DeviceError as error:
            answer[source.name] = str(error)
    print(json.dumps(answer), flush=True)
"""
HANGING = """
import json, os, sys, threading
from trimtab_slurm.devices import nvml

driver = nvml.open_driver(sys.argv[1])
sources = driver.sources([device.uuid for device in driver.inventory])
read = {}

def look(source):
    read[source.name] = source.devices()[0].sample().values["power_watts"]

threads = {source.name: threading.Thread(target=look, args=[source], daemon=True) for source in sources}
for thread in threads.values():
    thread.start()
for name, thread in threads.items():
    thread.join(0.3 if name == "GPU-1" else 30)
print(json.dumps(read), flush=True)
os._exit(0)  # as the thread that hangs would not let it end
"""
LOADING = """
import sys, threading, time
from trimtab_slurm.devices import DriverNotFound, nvml

def load():
    try:
        nvml.open_driver(sys.argv[1])
    except DriverNotFound:
        pass  # no GPU in it

thread, turns = threading.Thread(target=load), 0
thread.start()
while thread.is_alive():
    time.sleep(0.01)
    turns += 1
print(turns)
"""
GPM = "set * GpmSupport 1\n"


class Watched:
    """A process that holds the GPUs of an attempt: what it found, and its readings."""

    def __init__(self, library, variables):
        arguments = [sys.executable, "-c", WATCHER, library, json.dumps(variables)]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.sources, self.notes = json.loads(self.process.stdout.readline())
        self.now = 0.0

    def look(self, seconds=1.0):
        """A reading of each device, so long after the one before: by uuid, or by its source the error."""
        self.now += seconds
        print(self.now, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


@pytest.fixture
def watch(nvml_stub):
    """A function that starts to watch GPUs, by Slurm's list of them; the stub's library if no other is given."""
    started = []

    def start(held, library=nvml_stub.library):
        started.append(Watched(str(library), {"SLURM_JOB_GPUS": held}))
        return started[-1]

    yield start
    for watched in started:
        watched.close()


def test_eight_gpus_have_their_own_figures_in_si_units(nvml_stub, watch):
    lines = [nvml_stub.gpus(8)]
    for gpu in range(8):
        given = {
            "UtilizationGpu": 90 + gpu,
            "UtilizationMemory": 40 + gpu,
            "MemoryUsed": 1000 + gpu,
            "MemoryTotal": 85_899_345_920,
            "PowerUsage": 690_125 + gpu,
            "TotalEnergyConsumption": 9_876_543_210_500 + gpu,
            "Temperature": 60 + gpu,
            "ClockSM": 1980 + gpu,
            "ClockMemory": 2619 + gpu,
            "PcieSent": 1500 + gpu,
            "PcieReceived": 2500 + gpu,
            "ClocksEventReasons": 1,
            "EccCorrected": 3 + gpu,
            "EccUncorrected": gpu,
        }
        lines += [f"set {gpu} {name} {value}" for name, value in given.items()]
    nvml_stub.script("\n".join(lines))
    watched = watch("0-7")
    assert watched.sources == [f"GPU-{gpu}" for gpu in range(8)]
    assert watched.notes == []
    readings = watched.look()
    for gpu in range(8):
        reading = readings[f"GPU-{gpu}"]
        assert reading["values"] == {
            "utilization_ratio": (90 + gpu) / 100,
            "memory_utilization_ratio": (40 + gpu) / 100,
            "memory_used_bytes": 1000 + gpu,
            "memory_total_bytes": 85_899_345_920,
            "power_watts": (690_125 + gpu) / 1000,
            "energy_joules": (9_876_543_210_500 + gpu) / 1000,
            "temperature_celsius": 60 + gpu,
            "sm_clock_hertz": (1980 + gpu) * 1e6,
            "memory_clock_hertz": (2619 + gpu) * 1e6,
            "pcie_sent_bytes_per_second": (1500 + gpu) * 1000,
            "pcie_received_bytes_per_second": (2500 + gpu) * 1000,
            "throttle_reasons_bits": 1,
            "ecc_corrected_count": 3 + gpu,
            "ecc_uncorrected_count": gpu,
        }
        assert reading["events"] == []
        assert reading["processes"] == {}
        assert reading["identity"] == {
            "uuid": f"GPU-{gpu}",
            "kind": "gpu",
            "model": "NVIDIA H100",
            "index": gpu,
            "driver": "NVIDIA 570.86.15",
            "columns": list(figures.COLUMNS),
            "pci": f"00000000:{16 + gpu:02X}:00.0",
            "parent_uuid": "",
        }


def test_only_the_gpus_that_are_held_are_read(nvml_stub, watch):
    nvml_stub.script(nvml_stub.gpus(4) + "fail 0 * 999\nfail 3 * 999\n".replace("*", "PowerUsage"))
    watched = watch("1,2")
    assert watched.sources == ["GPU-1", "GPU-2"]
    assert all("power_watts" in reading["values"] for reading in watched.look().values())


def test_nvlink_is_a_rate_between_two_readings_and_never_negative(nvml_stub, watch):
    def script(sent, received):
        nvml_stub.script(f"{nvml_stub.gpus(1)}set 0 Field138 {sent}\nset 0 Field139 {received}\n")

    sent, received = "nvlink_sent_bytes_per_second", "nvlink_received_bytes_per_second"
    script(10**9, 10**9)
    watched = watch("0")
    first = watched.look()["GPU-0"]
    assert {sent, received}.isdisjoint(first["values"])
    assert first["absent"][sent] == first["absent"][received] == FIRST
    script(10**9 + 1000, 10**9 + 3000)
    second = watched.look(0.5)["GPU-0"]["values"]
    assert (second[sent], second[received]) == (1000 * 1024 / 0.5, 3000 * 1024 / 0.5)
    script(10**9 + 2000, 500)
    third = watched.look(0.5)["GPU-0"]
    assert third["values"][sent] == 1000 * 1024 / 0.5
    assert received not in third["values"]
    assert third["absent"][received] == f"the counter fell from {10**9 + 3000} to 500 KiB"
    script(10**9 + 2000, 700)
    assert watched.look(0.5)["GPU-0"]["values"][received] == 200 * 1024 / 0.5


def test_gpm_figures_are_between_two_samples_far_enough_apart(nvml_stub, watch):
    percent = {2: 81.5, 3: 40.25, 5: 62.5, 10: 30.0}
    metrics = "".join(f"set 0 Gpm{metric} {value}\n" for metric, value in (percent | {20: 1.5, 21: 2048}).items())
    metrics += "fail 0 PcieSent 999\n"  # which is not asked where GPM tells
    nvml_stub.script(nvml_stub.gpus(1) + GPM + metrics)
    watched = watch("0")
    gpm = {
        "sm_active_ratio": 0.815,
        "sm_occupancy_ratio": 0.4025,
        "tensor_active_ratio": 0.625,
        "dram_active_ratio": 0.3,
        "pcie_sent_bytes_per_second": 1.5 * 2**20,
        "pcie_received_bytes_per_second": 2**31,
    }
    first = watched.look()["GPU-0"]
    assert {first["absent"][column] for column in gpm} == {FIRST}
    assert gpm.items() <= watched.look()["GPU-0"]["values"].items()
    soon = watched.look(0.05)["GPU-0"]
    assert {soon["absent"][column] for column in gpm} == {"less than 0.1 s after the reading before"}
    assert gpm.items() <= watched.look(0.06)["GPU-0"]["values"].items()
    nvml_stub.script(nvml_stub.gpus(1) + GPM + metrics + "fail 0 Gpm3 999\nset 0 Gpm5 nan\n")
    partly = watched.look()["GPU-0"]
    assert partly["values"]["sm_active_ratio"] == 0.815
    assert partly["absent"] == {
        "sm_occupancy_ratio": "NVML: Unknown Error",
        "tensor_active_ratio": "the driver says nan %, which cannot be",
    }


def test_mig_instances_have_their_own_memory_activity_and_processes(nvml_stub, watch):
    nvml_stub.script(
        nvml_stub.gpus(2)
        + GPM
        + "mig 0 0 MIG-a 7 0\nmig 0 2 MIG-b 9 1\nmig 0 3 MIG-of-others 11 0\n"
        + "set 0 PowerUsage 300000\nset 0 MemoryUsed 99\nset 0 MemoryTotal 100\n"
        + "set 0/0 MemoryUsed 10\nset 0/0 MemoryTotal 20\nset 0/2 MemoryUsed 30\nset 0/2 MemoryTotal 40\n"
        + "set 0/0 Gpm2 12.5\nset 0/2 Gpm2 50\nset 0 Gpm2 99\n"
        + "process 0/0 4711 10\nprocess 0/3 4712 10\n"
        + "xid 0/2 31\nxid 0/3 43\nxid 0 63\n"
    )
    watched = watch("MIG-b,MIG-a")
    assert watched.sources == ["GPU-0"]
    first, second = watched.look(), watched.look()
    assert list(first) == ["MIG-a", "MIG-b"]
    for uuid, used, total, active, index in (("MIG-a", 10, 20, 0.125, 0), ("MIG-b", 30, 40, 0.5, 2)):
        reading = second[uuid]
        assert reading["values"] == {
            "memory_used_bytes": used,
            "memory_total_bytes": total,
            "sm_active_ratio": active,
            "sm_occupancy_ratio": 0,
            "tensor_active_ratio": 0,
            "dram_active_ratio": 0,
        }
        whole = {reason for column, reason in reading["absent"].items()}
        assert whole == {"NVML gives it of the whole GPU only, not of a MIG instance"}
        assert reading["values"].keys() | reading["absent"].keys() == set(figures.COLUMNS)
        identity = reading["identity"]
        assert (identity["kind"], identity["parent_uuid"], identity["index"]) == ("mig", "GPU-0", index)
        assert (identity["model"], identity["pci"]) == ("NVIDIA H100 MIG", "00000000:10:00.0")
    assert first["MIG-a"]["processes"] == {"4711": 10}
    assert first["MIG-b"]["processes"] == {}
    # Of the GPU as a whole, the first that is held is told; of somebody else's instance, nobody.
    assert first["MIG-a"]["events"] == [["xid", "XID 63 on GPU-0: a bad memory row or page was set aside"]]
    assert first["MIG-b"]["events"] == [["xid", f"XID 31 on MIG-b: {XIDS[31]}"]]
    assert second["MIG-a"]["events"] == second["MIG-b"]["events"] == []


def test_a_gpu_that_is_lost_is_named_and_costs_no_other(nvml_stub, watch):
    nvml_stub.script(nvml_stub.gpus(3))
    watched = watch("0,1,2")
    assert watched.look()["GPU-1"]["values"]["power_watts"] == 0
    nvml_stub.script(nvml_stub.gpus(3) + "fail 1 * 15\nxid 1 79\nset 2 PowerUsage 5000\n")
    for _ in range(2):  # the text stays the same, so that it is recorded once
        readings = watched.look()
        assert readings["GPU-1"] == (
            "GPU-1 is lost: it has fallen off the bus; drain the node, and reset the GPU or reboot; "
            "XID 79 on GPU-1: the GPU has fallen off the bus"
        )
        assert readings["GPU-2"]["values"]["power_watts"] == 5
    nvml_stub.script(nvml_stub.gpus(3) + "fail 1 MemoryInfo 16\n")
    assert watched.look()["GPU-1"].startswith("GPU-1 needs a reset: ")


def test_a_gpu_that_is_lost_before_the_first_reading_is_named_and_may_come_back(nvml_stub, watch):
    nvml_stub.script(nvml_stub.gpus(2))
    watched = watch("0,1")
    nvml_stub.script(nvml_stub.gpus(2) + "fail 1 * 16\n")
    for _ in range(2):
        assert watched.look()["GPU-1"].startswith("GPU-1 needs a reset: drain the node")
    nvml_stub.script(nvml_stub.gpus(2))
    assert watched.look()["GPU-1"]["values"]["power_watts"] == 0


def test_a_gpu_that_is_lost_from_the_start_costs_no_other(nvml_stub, watch):
    nvml_stub.script(nvml_stub.gpus(3) + "fail 1 * 15\n")
    watched = watch("GPU-0,GPU-2")
    assert watched.sources == ["GPU-0", "GPU-2"]
    assert watched.notes == ["GPU 1 of 3: NVML: GPU is lost; it is not measured"]
    watched = watch("GPU-1")
    assert watched.sources == ["the job's processes"]
    assert watched.notes[0].startswith("GPUs not known: 1 GPU held (GPU-1), not measured: ")
    assert watched.notes[1:] == ["GPU 1 of 3: NVML: GPU is lost; it is not measured"]


def test_what_is_not_supported_is_not_asked_for_again_and_what_just_failed_is(nvml_stub, watch):
    given = "set 0 PowerUsage 1000\nset 0 UtilizationGpu 50\nset 0 TotalEnergyConsumption 7000\nset 0 EccCorrected 1\n"
    faults = {
        "PowerUsage": (3, "Not Supported"),
        "UtilizationRates": (4, "Insufficient Permissions"),
        "TotalEnergyConsumption": (999, "Unknown Error"),
        "EccCorrected": (13, "Function Not Found (the driver is older than that)"),
        "ComputeRunningProcesses": (3, "Not Supported"),
        "RegisterEvents": (3, "Not Supported"),
    }
    script = nvml_stub.gpus(1) + given
    nvml_stub.script(script + "".join(f"fail 0 {call} {code}\n" for call, (code, _) in faults.items()))
    watched = watch("0")
    reading = watched.look()["GPU-0"]
    of = {
        column: f"NVML: {faults[call][1]}"
        for column, call in {
            "power_watts": "PowerUsage",
            "utilization_ratio": "UtilizationRates",
            "memory_utilization_ratio": "UtilizationRates",
            "energy_joules": "TotalEnergyConsumption",
            "ecc_corrected_count": "EccCorrected",
        }.items()
    }
    assert of.items() <= reading["absent"].items()
    assert of.keys().isdisjoint(reading["values"])
    assert reading["values"]["ecc_uncorrected_count"] == 0
    assert reading["processes"] is None
    assert reading["events"] == [
        ["fault", "GPU-0: XID errors are not told of: NVML: Not Supported"],
        ["fault", "GPU-0: processes not known: NVML: Not Supported"],
    ]
    nvml_stub.script(script + "process 0 1 1\n")
    reading = watched.look()["GPU-0"]
    assert reading["values"]["energy_joules"] == 7
    del of["energy_joules"]
    assert of.items() <= reading["absent"].items()
    assert of.keys().isdisjoint(reading["values"])
    assert reading["processes"] is None
    assert reading["events"] == []


@pytest.mark.parametrize(
    ("call", "raw", "column", "unit"),
    [
        ("UtilizationGpu", 2**32 - 1, "utilization_ratio", " %"),
        ("UtilizationGpu", 101, "utilization_ratio", " %"),
        ("PowerUsage", 2**32 - 1, "power_watts", " mW"),
        ("TotalEnergyConsumption", 2**64 - 1, "energy_joules", " mJ"),
        ("Temperature", 255, "temperature_celsius", " °C"),
        ("Temperature", -1, "temperature_celsius", " °C"),
        ("ClockSM", 2**32 - 1, "sm_clock_hertz", " MHz"),
        ("PcieSent", 2**32 - 1, "pcie_sent_bytes_per_second", " KB/s"),
        ("EccUncorrected", 2**64 - 1, "ecc_uncorrected_count", ""),
        ("EccCorrected", 2**32 - 1, "ecc_corrected_count", ""),
        ("ClocksEventReasons", 2**64 - 1, "throttle_reasons_bits", ""),
        ("MemoryTotal", 2**64 - 1, "memory_total_bytes", " bytes"),
    ],
)
def test_a_sentinel_is_no_figure(nvml_stub, watch, call, raw, column, unit):
    nvml_stub.script(f"{nvml_stub.gpus(1)}set 0 {call} {raw}\n")
    reading = watch("0").look()["GPU-0"]
    assert column not in reading["values"]
    assert reading["absent"][column] == f"the driver says {raw}{unit}, which cannot be"
    assert reading["events"] == []


def test_more_memory_than_there_is_is_no_figure(nvml_stub, watch):
    nvml_stub.script(nvml_stub.gpus(1) + "set 0 MemoryTotal 100\nset 0 MemoryUsed 101\n")
    reading = watch("0").look()["GPU-0"]
    assert reading["values"]["memory_total_bytes"] == 100
    assert reading["absent"]["memory_used_bytes"] == "the driver says 101 bytes of 100, which cannot be"


def test_a_gpu_that_hangs_holds_up_itself_alone(nvml_stub):
    powers = "".join(f"set {gpu} PowerUsage {gpu}000\n" for gpu in range(4))
    nvml_stub.script(nvml_stub.gpus(4) + powers + "delay 1 UtilizationRates 3600\n")
    command = [sys.executable, "-c", HANGING, str(nvml_stub.library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == {"GPU-0": 0, "GPU-2": 2, "GPU-3": 3}


def test_a_library_that_takes_long_to_load_stops_no_other_thread(compile_nvml):
    command = [sys.executable, "-c", LOADING, str(compile_nvml("-DSLOW_LOAD"))]
    turns = int(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)
    assert turns > 10  # of a hundred; two or three where loading holds the interpreter's lock


@pytest.mark.parametrize(
    ("fault", "note"),
    [
        ("fail * Init 18", "does not work: 2 GPUs held (0, 1), not measured: NVML: the library is of another version"),
        ("fail * Init 999", "does not work: 2 GPUs held (0, 1), not measured: NVML: Unknown Error; see whether"),
        ("fail * Count 999", "does not work: 2 GPUs held (0, 1), not measured: NVML: Unknown Error; see whether"),
        (
            "fail * Init 9",
            "not found: 2 GPUs held (0, 1), not measured: NVML: the kernel's NVIDIA driver is not loaded",
        ),
        ("fail * * 15", "does not work: 2 GPUs held (0, 1), not measured: GPU 0 of 2: NVML: GPU is lost; it is not"),
    ],
)
def test_a_library_that_does_not_work_is_said_and_the_processes_are_measured(nvml_stub, watch, fault, note):
    nvml_stub.script(nvml_stub.gpus(2) + fault + "\n")
    watched = watch("0,1")
    assert watched.sources == ["the job's processes"]
    (said,) = watched.notes
    assert said.startswith(f"GPU driver {note}")
    assert ("does not work" in note) == ("AMD SMI" not in said)  # what is merely not there explains nothing


def test_a_node_without_gpus_or_without_a_library_is_said(nvml_stub, watch):
    beginning = "GPU driver not found: 1 GPU held (0), not measured: NVML: "
    assert watch("0").notes[0].startswith(f"{beginning}no GPU on this node")
    missing = nvml_stub.library.with_name("missing.so")
    assert (
        watch("0", missing).notes[0].startswith(f'{beginning}nvml_library = "{missing}" in node.toml cannot be loaded')
    )


def test_gpus_that_cannot_be_told_apart_are_not_measured(nvml_stub, watch):
    script = nvml_stub.gpus(2).replace("GPU-0 0", "GPU-0 5").replace("GPU-1 1", "GPU-1 4")
    nvml_stub.script(script)
    watched = watch("0")
    assert watched.sources == ["the job's processes"]
    assert watched.notes[0].startswith("GPUs not known: 1 GPU held (0), not measured: ")
    assert watch("0,1").sources == ["GPU-0", "GPU-1"]


def test_an_older_library_gives_what_it_has(nvml_stub, watch, compile_nvml):
    nvml_stub.script(
        nvml_stub.gpus(1).replace("570.86.15", "470.82.01")
        + "set 0 PowerUsage 1000\nset 0 Temperature 50\nset 0 ClocksEventReasons 64\n"
    )
    nvml_stub.library.unlink()
    compile_nvml("-DOLD_DRIVER").rename(nvml_stub.library)
    watched = watch("0")
    watched.look()
    reading = watched.look()["GPU-0"]
    assert reading["identity"]["driver"] == "NVIDIA 470.82.01"
    assert reading["values"]["power_watts"] == 1
    assert reading["values"]["temperature_celsius"] == 50
    assert reading["values"]["throttle_reasons_bits"] == 64
    older = "NVML: Function Not Found (the driver is older than that)"
    no_gpm = "NVML: GPM: Function Not Found"
    assert reading["absent"] == {
        "memory_used_bytes": older,
        "memory_total_bytes": older,
        "sm_active_ratio": no_gpm,
        "sm_occupancy_ratio": no_gpm,
        "tensor_active_ratio": no_gpm,
        "dram_active_ratio": no_gpm,
    }
    assert reading["processes"] is None


def test_xid_errors_are_told_once_with_their_meaning(nvml_stub, watch):
    nvml_stub.script(nvml_stub.gpus(2))
    watched = watch("0,1")
    assert watched.look()["GPU-0"]["events"] == []
    nvml_stub.script(nvml_stub.gpus(2) + "xid 0 48\nxid 0 9999\nxid 1 94\n")
    readings = watched.look()
    assert readings["GPU-0"]["events"] == [
        ["xid", "XID 48 on GPU-0: memory error that could not be corrected (double bit)"],
        ["xid", "XID 9999 on GPU-0: see NVIDIA's catalog of XID errors"],
    ]
    assert readings["GPU-1"]["events"] == [["xid", f"XID 94 on GPU-1: {XIDS[94]}"]]
    assert [reading["events"] for reading in watched.look().values()] == [[], []]


def test_throttling_is_told_when_it_begins_and_when_it_has_ended(nvml_stub, watch):
    def reasons(bits):
        nvml_stub.script(f"{nvml_stub.gpus(1)}set 0 ClocksEventReasons {bits}\n")

    reasons(0x1 | 0x2)  # idle, and at the clocks that somebody set
    watched = watch("0")
    assert watched.look()["GPU-0"]["events"] == []
    reasons(0x4 | 0x40)
    assert watched.look()["GPU-0"]["events"] == [
        ["throttle", "GPU-0 is throttled: power cap"],
        ["throttle", "GPU-0 is throttled: temperature, by the hardware"],
    ]
    assert watched.look()["GPU-0"]["events"] == []
    reasons(0x1000)  # of a later driver
    assert watched.look(4)["GPU-0"]["events"] == [["throttle", "GPU-0 is throttled: reason 0x1000"]]
    reasons(0x4)
    assert watched.look(4)["GPU-0"]["events"] == []  # in and out of the power cap is one throttling
    reasons(0)
    assert watched.look(4)["GPU-0"]["events"] == [
        ["throttle", "GPU-0 is no longer throttled: temperature, by the hardware"]
    ]
    assert watched.look(60)["GPU-0"]["events"] == [
        ["throttle", "GPU-0 is no longer throttled: power cap"],
        ["throttle", "GPU-0 is no longer throttled: reason 0x1000"],
    ]


def test_a_processs_memory_that_is_not_known_is_no_figure(nvml_stub, watch):
    nvml_stub.script(
        nvml_stub.gpus(2)
        + f"process 0 4711 123456\nprocess 0 4712 {2**64 - 1}\nprocess 0 4713 {2**63}\nprocess 1 4714 0\n"
    )
    readings = watch("0,1").look()
    known = {pid: size for pid, size in readings["GPU-0"]["processes"].items() if not math.isnan(size)}
    assert known == {"4711": 123456}
    assert set(readings["GPU-0"]["processes"]) == {"4711", "4712", "4713"}
    assert readings["GPU-1"]["processes"] == {"4714": 0}
