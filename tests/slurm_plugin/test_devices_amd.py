"""AMD GPUs, over a module that behaves as amdsmi's documentation says: no hardware, and no libamd_smi.so."""

import math
import sys
import types
from dataclasses import replace

import pytest

from trimtab_slurm.devices import DeviceError, DriverNotFound, amd, discover, nvml

NOT_SUPPORTED, NO_PERM, DRIVER_NOT_LOADED, UNKNOWN = 2, 10, 34, 0xFFFFFFFF


class AmdSmiException(Exception):
    """As amdsmi's own."""


class AmdSmiLibraryException(AmdSmiException):
    def __init__(self, err_code, err_info):
        super().__init__(err_code)
        self.err_code = err_code
        self.err_info = err_info

    def __str__(self):
        return f"Error code:\n\t{self.err_code} | {self.err_info}"


class FakeAmdsmi(types.ModuleType):
    """Answers for GPUs 0 and on. `answers` by function, or by function and GPU; an exception is raised."""

    AmdSmiException = AmdSmiException
    AmdSmiMemoryType = types.SimpleNamespace(VRAM="VRAM")
    AmdSmiTemperatureType = types.SimpleNamespace(HOTSPOT="HOTSPOT")
    AmdSmiTemperatureMetric = types.SimpleNamespace(CURRENT="CURRENT")
    AmdSmiClkType = types.SimpleNamespace(GFX="GFX", MEM="MEM")

    def __init__(self, count):
        super().__init__("amdsmi")
        self.asked = []
        self.answers = {
            "init": None,
            "get_processor_handles": list(range(count)),
            "get_gpu_asic_info": {"market_name": "AMD Instinct MI300X"},
            "get_gpu_driver_info": {"driver_name": "amdgpu", "driver_version": "6.8.5"},
            "get_gpu_activity": {"gfx_activity": 97, "umc_activity": 55, "mm_activity": "N/A"},
            "get_gpu_memory_usage": 1000,
            "get_gpu_memory_total": 206_141_652_992,
            "get_power_info": {"current_socket_power": 745, "average_socket_power": "N/A"},
            "get_energy_count": {"energy_accumulator": 10**12, "counter_resolution": 15.25},
            "get_temp_metric": 71,
            "get_clock_info GFX": {"clk": 2100},
            "get_clock_info MEM": {"clk": 1300},
            "get_gpu_total_ecc_count": {"correctable_count": 4, "uncorrectable_count": 1, "deferred_count": 0},
            "get_gpu_process_list": [],
        }
        for gpu in range(count):
            self.answers[f"get_gpu_device_uuid {gpu}"] = f"uuid-{gpu}"
            self.answers[f"get_gpu_device_bdf {gpu}"] = f"0000:{gpu:02x}:00.0"
            self.answers[f"get_gpu_enumeration_info {gpu}"] = {"drm_render": 128 + gpu, "hip_id": gpu}

    def __getattr__(self, name):
        if not name.startswith("amdsmi_"):
            raise AttributeError(name)
        function = name.removeprefix("amdsmi_")

        def ask(*arguments):
            self.asked.append(function)
            keys = (*(f"{function} {each}" for each in arguments), function)
            answer = next(self.answers[key] for key in keys if key in self.answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return ask


@pytest.fixture
def amdsmi(monkeypatch):
    fake = FakeAmdsmi(2)
    monkeypatch.setitem(sys.modules, "amdsmi", fake)
    return fake


@pytest.fixture
def device():
    """A function that gives the first GPU."""

    def first():
        driver = amd.open_driver()
        ((found,),) = [source.devices() for source in driver.sources([driver.inventory[0].uuid])]
        return found

    return first


def test_gpus_are_listed_with_their_render_nodes_numbers(amdsmi):
    driver = amd.open_driver()
    assert [(each.uuid, each.index, each.minor, each.pci) for each in driver.inventory] == [
        ("uuid-0", 0, 128, "0000:00:00.0"),
        ("uuid-1", 1, 129, "0000:01:00.0"),
    ]
    assert [source.name for source in driver.sources(["uuid-1"])] == ["uuid-1"]


def test_a_gpu_has_figures_in_si_units(amdsmi, device):
    gpu = device()
    values = {
        "utilization_ratio": 0.97,
        "memory_utilization_ratio": 0.55,
        "memory_used_bytes": 1000,
        "memory_total_bytes": 206_141_652_992,
        "power_watts": 745,
        "energy_joules": 15_250_000,
        "temperature_celsius": 71,
        "sm_clock_hertz": 2.1e9,
        "memory_clock_hertz": 1.3e9,
        "ecc_corrected_count": 4,
        "ecc_uncorrected_count": 1,
    }
    reading = gpu.sample()
    assert reading.values == values
    assert reading.absent == {}
    assert reading.processes == {}
    assert gpu.identity.columns == tuple(values)
    assert (gpu.identity.model, gpu.identity.driver) == ("AMD Instinct MI300X", "amdgpu 6.8.5")
    assert (gpu.identity.uuid, gpu.identity.kind, gpu.identity.pci) == ("uuid-0", "gpu", "0000:00:00.0")


def test_older_gpus_say_their_power_in_another_field(amdsmi, device):
    amdsmi.answers["get_power_info"] = {"current_socket_power": 2**32 - 1, "average_socket_power": 301}
    assert device().sample().values["power_watts"] == 301


def test_what_fails_costs_its_own_figures_and_is_asked_again_unless_it_is_not_supported(amdsmi, device):
    good = dict(amdsmi.answers)
    amdsmi.answers |= {
        "get_temp_metric": AmdSmiLibraryException(NOT_SUPPORTED, "AMDSMI_STATUS_NOT_SUPPORTED - not supported"),
        "get_gpu_total_ecc_count": AmdSmiLibraryException(NO_PERM, "AMDSMI_STATUS_NO_PERM - Permission Denied"),
        "get_gpu_activity": AmdSmiLibraryException(UNKNOWN, "AMDSMI_STATUS_UNKNOWN_ERROR - unknown"),
        "get_energy_count": AmdSmiException("Invalid\n parameter"),
    }
    gpu = device()
    reading = gpu.sample()
    permission = "AMD SMI: AMDSMI_STATUS_NO_PERM - Permission Denied"
    unknown = "AMD SMI: AMDSMI_STATUS_UNKNOWN_ERROR - unknown"
    assert reading.absent == {
        "temperature_celsius": "AMD SMI: AMDSMI_STATUS_NOT_SUPPORTED - not supported",
        "ecc_corrected_count": permission,
        "ecc_uncorrected_count": permission,
        "utilization_ratio": unknown,
        "memory_utilization_ratio": unknown,
        "energy_joules": "AMD SMI: Invalid parameter",
    }
    assert reading.values["power_watts"] == 745
    amdsmi.answers, amdsmi.asked = good, []
    reading = gpu.sample()
    assert reading.values["utilization_ratio"] == 0.97
    assert set(reading.absent) == {"temperature_celsius", "ecc_corrected_count", "ecc_uncorrected_count"}
    assert {"get_temp_metric", "get_gpu_total_ecc_count"}.isdisjoint(amdsmi.asked)


def test_what_the_driver_does_not_know_is_no_figure(amdsmi, device):
    amdsmi.answers |= {
        "get_gpu_activity": {"gfx_activity": "N/A", "umc_activity": 0xFFFF},
        "get_power_info": {"current_socket_power": "N/A", "average_socket_power": "N/A"},
        "get_energy_count": {"energy_accumulator": 2**64 - 1, "counter_resolution": 15.25},
        "get_gpu_memory_usage": 206_141_652_993,
        "get_clock_info GFX": {"clk": 0xFFFFFFFF},
    }
    reading = device().sample()
    assert reading.absent == {
        "utilization_ratio": "the driver says N/A",
        "memory_utilization_ratio": "the driver says 65535",
        "power_watts": "the driver says N/A and N/A",
        "energy_joules": f"the driver says {(2**64 - 1) * 15.25} µJ, which cannot be",
        "memory_used_bytes": "the driver says 206141652993 bytes of 206141652992, which cannot be",
        "sm_clock_hertz": "the driver says 4294967295",
    }
    assert reading.values["memory_clock_hertz"] == 1.3e9


def test_processes_have_the_gpus_memory_that_they_hold(amdsmi, device):
    amdsmi.answers["get_gpu_process_list"] = [
        {"name": "python", "pid": 4711, "mem": 99, "memory_usage": {"gtt_mem": 1, "cpu_mem": 2, "vram_mem": 1000}},
        {"name": "N/A", "pid": 4712, "mem": 0, "memory_usage": {"gtt_mem": 0, "cpu_mem": 0, "vram_mem": "N/A"}},
    ]
    gpu = device()
    processes = gpu.sample().processes
    assert processes.keys() == {4711, 4712}
    assert processes[4711] == 1000
    assert math.isnan(processes[4712])
    amdsmi.answers["get_gpu_process_list"] = AmdSmiLibraryException(NO_PERM, "AMDSMI_STATUS_NO_PERM")
    assert gpu.sample().processes is None


def test_a_gpu_that_does_not_say_what_it_is_is_named(amdsmi, device):
    amdsmi.answers["get_gpu_asic_info"] = AmdSmiLibraryException(UNKNOWN, "AMDSMI_STATUS_UNKNOWN_ERROR - unknown")
    with pytest.raises(DeviceError, match=r"^uuid-0: AMD SMI: AMDSMI_STATUS_UNKNOWN_ERROR - unknown$"):
        device()


def test_a_driver_that_is_absent_and_one_that_fails_are_told_apart(amdsmi, monkeypatch):
    amdsmi.answers["init"] = AmdSmiLibraryException(DRIVER_NOT_LOADED, "AMDSMI_STATUS_DRIVER_NOT_LOADED - not loaded")
    with pytest.raises(DriverNotFound, match="DRIVER_NOT_LOADED"):
        amd.open_driver()
    amdsmi.answers["init"] = AmdSmiLibraryException(UNKNOWN, "AMDSMI_STATUS_UNKNOWN_ERROR - unknown")
    with pytest.raises(DeviceError, match="see whether amd-smi works") as raised:
        amd.open_driver()
    assert not isinstance(raised.value, DriverNotFound)
    amdsmi.answers |= {"init": None, "get_processor_handles": []}
    with pytest.raises(DriverNotFound, match="no GPU"):
        amd.open_driver()
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    with pytest.raises(DriverNotFound, match="not installed"):
        amd.open_driver()


def test_gpus_of_one_uuid_are_refused(amdsmi):
    amdsmi.answers["get_gpu_device_uuid 1"] = "uuid-0"
    with pytest.raises(DeviceError, match="same uuid"):
        amd.open_driver()


def test_a_job_that_holds_amd_gpus_is_measured_by_them(amdsmi, attempt, monkeypatch):
    def none(_library):
        raise DriverNotFound("NVML: no libnvidia-ml.so.1")

    monkeypatch.setattr(nvml, "open_driver", none)
    found = discover(replace(attempt, gpu_variables={"SLURM_JOB_GPUS": "0,1"}))
    assert [source.name for source in found.sources] == ["uuid-0", "uuid-1"]
    assert found.notes == ()
