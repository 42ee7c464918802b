import re
import sys
import types
from pathlib import Path

import pytest

from trimtab_slurm.devices import DeviceError, DriverNotFound
from trimtab_slurm.devices.figures import ONE, PERCENT, Absent, Figures, Reader, Unit

DOCUMENT = Path(__file__).parents[2] / "docs/drivers.md"


class DriverError(Exception):
    """What a driver raises."""


def figures(readers, explain=lambda error: Absent(f"driver: {error}"), never=()):
    return Figures(readers, DriverError, explain, dict(never))


def test_units_are_exact():
    readers = [
        Reader({"power_watts": Unit("mW", per=1e3), "sm_clock_hertz": Unit("MHz", times=1e6)}, lambda: (250_123, 1980)),
        Reader({"utilization_ratio": PERCENT}, lambda: (57,)),
    ]
    assert figures(readers).read() == (
        {"power_watts": 250.123, "sm_clock_hertz": 1.98e9, "utilization_ratio": 0.57},
        {},
    )


def test_what_fails_is_absent_alone_and_what_never_is_stays_so():
    def fail():
        raise DriverError("busy")

    readers = [
        Reader({"power_watts": ONE, "energy_joules": ONE}, fail),
        Reader({"utilization_ratio": ONE, "memory_utilization_ratio": ONE}, lambda: (0.5, DriverError("no data"))),
    ]
    values, absent = figures(readers, never={"sm_active_ratio": "no such counter"}).read()
    assert values == {"utilization_ratio": 0.5}
    assert absent == {
        "power_watts": "driver: busy",
        "energy_joules": "driver: busy",
        "memory_utilization_ratio": "driver: no data",
        "sm_active_ratio": "no such counter",
    }


def test_a_question_is_asked_as_long_as_one_of_its_columns_may_be_answered():
    asked = []

    def ask():
        asked.append(None)
        return 1.0, Absent("not here", final=len(asked) > 1)

    read = figures([Reader({"power_watts": ONE, "energy_joules": ONE}, ask)])
    for _ in range(4):
        assert read.read() == ({"power_watts": 1.0}, {"energy_joules": "not here"})
    assert len(asked) == 4

    def never():
        asked.append(None)
        raise Absent("not here", final=True)

    asked.clear()
    read = figures([Reader({"power_watts": ONE, "energy_joules": ONE}, never)])
    for _ in range(4):
        assert read.read() == ({}, {"power_watts": "not here", "energy_joules": "not here"})
    assert len(asked) == 1


def test_a_device_that_is_gone_fails_as_a_whole():
    def gone(error):
        raise DeviceError("GPU-1 is lost") from error

    with pytest.raises(DeviceError, match="GPU-1 is lost"):
        figures([Reader({"power_watts": ONE}, lambda: [DriverError("bus")])], gone).read()


def test_the_documented_driver_works(monkeypatch):
    library = types.ModuleType("xpulib")
    library.Error = DriverError
    library.count = lambda: 2
    library.uuid = lambda index: f"XPU-{index}"
    library.power = lambda index: 1500 * (index + 1)

    def clock(index):
        raise DriverError("asleep")

    library.clock = clock
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    module = {}
    exec(code, module)
    monkeypatch.setitem(sys.modules, "xpulib", None)
    with pytest.raises(DriverNotFound, match="not installed"):
        module["open_driver"]()
    monkeypatch.setitem(sys.modules, "xpulib", library)
    driver = module["open_driver"]()
    assert [device.uuid for device in driver.inventory] == ["XPU-0", "XPU-1"]
    ((device,),) = [source.devices() for source in driver.sources(["XPU-1"])]
    reading = device.sample()
    assert reading.values == {"power_watts": 3.0}
    assert reading.absent == {"sm_clock_hertz": "XPU: asleep"}
    assert device.identity.columns == ("power_watts", "sm_clock_hertz")
