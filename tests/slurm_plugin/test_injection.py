"""Faults that are made up: how they are asked for, what they do to fakes, and to a real sampler."""

import os
import re
import signal

import pytest

from trimtab_slurm import journal
from trimtab_slurm.admin.nodefiles import config_text
from trimtab_slurm.devices import DeviceError, Discovery, Identity, Reading
from trimtab_slurm.injection import FORMS, Fault, Injection, InjectionError, parse
from trimtab_slurm.settings import NodeSettings


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("lost:0@5", Fault("lost:0@5", "lost", index=0, seconds=5.0)),
        ("hang:12@0.5", Fault("hang:12@0.5", "hang", index=12, seconds=0.5)),
        ("slow:3@0=2.5", Fault("slow:3@0=2.5", "slow", index=3, delay=2.5)),
        ("unsupported:power_watts", Fault("unsupported:power_watts", "unsupported", column="power_watts")),
        ("driver", Fault("driver", "driver")),
        ("driver-hang", Fault("driver-hang", "driver-hang")),
        ("die@7", Fault("die@7", "die", seconds=7.0)),
        ("disk@7", Fault("disk@7", "disk", seconds=7.0)),
    ],
)
def test_a_fault_is_read_as_it_is_documented(text, fault):
    assert parse(text) == fault


@pytest.mark.parametrize(
    "text",
    ["losst:0@5", "lost", "lost:0", "lost:-1@5", "lost:0@5=2", "lost:0@٥", "slow:0@5", "die@", "driver@5", "disk@1e9"],
)
def test_a_fault_that_is_none_is_refused_with_those_there_are(text):
    with pytest.raises(InjectionError) as caught:
        parse(text)
    assert str(caught.value).startswith(f"fault {text!r} is not known; choose from lost:INDEX@SECONDS, ")
    assert all(form in str(caught.value) for form in FORMS.values())


def test_a_figure_that_no_device_has_is_refused_with_those_that_are_meant():
    with pytest.raises(
        InjectionError, match=r"'unsupported:power_wats': no device has power_wats; did you mean power_w"
    ):
        parse("unsupported:power_wats")
    with pytest.raises(
        InjectionError, match=r"no device has zzz; choose from cpu_seconds, .*, written_bytes_per_second$"
    ):
        parse("unsupported:zzz")


def test_node_toml_says_how_a_fault_is_written():
    explained = config_text(NodeSettings()).replace("\n# ", " ")
    assert all(re.search(rf"\b{form}[ ,;]", explained) for form in FORMS.values())


class FakeDevice:
    def __init__(self, index):
        self.identity = Identity(f"gpu-{index}", "gpu", "H100", index, "fake", ("power_watts", "sm_active_ratio"))

    def sample(self):
        return Reading({"power_watts": 300.0, "sm_active_ratio": 0.5})


class FakeSource:
    name = "fake"

    def devices(self):
        return [FakeDevice(0), FakeDevice(1)]


FOUND = Discovery((FakeSource(),), ("a note",))


def devices(*texts):
    """The fake source's two devices with faults that have begun."""
    injection = Injection(texts)
    (source,) = injection.discover(lambda: FOUND)().sources
    injection.start()
    return source.devices()


def test_without_a_fault_nothing_is_wrapped():
    discover = FakeSource.devices
    assert Injection(["", " "]).discover(discover) is discover
    assert type(Injection([]).writer(0)) is journal.Writer


def test_a_fault_is_its_devices_alone():
    lost, other = devices("lost:0@0")
    assert lost.identity == FakeDevice(0).identity
    with pytest.raises(DeviceError, match=r"^injected: gpu-0 is lost$"):
        lost.sample()
    assert other.sample() == FakeDevice(1).sample()


def test_a_fault_begins_when_it_is_to():
    injection = Injection(["lost:0@0", "lost:1@1000"])
    (source,) = injection.discover(lambda: FOUND)().sources
    first, second = source.devices()
    assert first.sample() == second.sample() == FakeDevice(0).sample()  # before it was started
    injection.start()
    with pytest.raises(DeviceError):
        first.sample()
    assert second.sample() == FakeDevice(1).sample()


def test_a_figure_that_is_not_supported_is_absent_with_a_reason():
    for device in devices("unsupported:sm_active_ratio", "unsupported:process_count"):
        assert device.sample() == Reading({"power_watts": 300.0}, {"sm_active_ratio": "injected: not supported"})


def test_a_driver_that_cannot_be_used_gives_no_sources():
    with pytest.raises(DeviceError, match=r"^injected: the drivers cannot be used$"):
        Injection(["driver"]).discover(lambda: FOUND)()


def test_a_fault_is_announced_with_its_condition_and_what_is_none_is_left_out():
    lost, figure, disk, none = Injection(["lost:0@5", "unsupported:power_watts", "disk@5", "lots:0@5"]).announcements
    assert lost == "injected: lost:0@5, if there is a device 0"
    assert figure == "injected: unsupported:power_watts, of devices that have it"
    assert disk == "injected: disk@5"
    assert none.startswith("not injected: fault 'lots:0@5' is not known; choose from lost:INDEX@SECONDS, ")


def test_a_task_is_lost_by_its_rank_and_others_go_on(start_sampler, start_task, until, syslog):
    for rank in (0, 1):
        start_task(start_sampler.attempt, rank)
    sampler = start_sampler(fault="lost:1@0.3, unsupported:memory_used_bytes", options=["--fault", "bad"])
    until(lambda: any("is lost" in text for text in sampler.faults()))
    before = len(sampler.journal().devices[0].times)
    until(lambda: len(sampler.journal().devices[0].times) > before + 3)
    sampler.signal(signal.SIGTERM)
    node = sampler.part()
    assert sampler.wait() == 0
    assert [event.text.partition(";")[0] for event in node.events if event.kind == "fault"] == [
        "not injected: fault 'bad' is not known",
        "injected: lost:1@0.3, if there is a device 1",
        "injected: unsupported:memory_used_bytes, of devices that have it",
        "injected: cpu-n1-task1 is lost",
    ]
    kept, lost = node.devices
    assert (kept.index, lost.index) == (0, 1)
    assert 2 <= len(lost.samples["time_seconds"]) < len(kept.samples["time_seconds"])
    assert kept.absent == lost.absent == {"memory_used_bytes": "injected: not supported"}
    for words in ("not injected: fault 'bad'", "injected: lost:1@0.3", "injected: cpu-n1-task1 is lost"):
        syslog.said("sampler of job 7 on n1", words)


def test_a_call_that_hangs_keeps_neither_the_sampler_nor_its_end(start_sampler, start_task, until):
    start_task(start_sampler.attempt, 0)
    sampler = start_sampler(fault="hang:0@0.2")
    until(lambda: sampler.journal().devices)
    until(sampler.stands_still)
    sampler.signal(signal.SIGTERM)
    assert sampler.wait() == 0
    node = sampler.part()
    assert node.events[-1].text == "stopped: SIGTERM"
    assert node.events[-2].text.startswith("the job's processes: no answer in the last ")


def test_drivers_that_do_not_answer_are_said_and_the_sampler_ends_all_the_same(start_sampler, until):
    sampler = start_sampler(fault="driver-hang")
    until(lambda: "injected: driver-hang" in sampler.faults())
    sampler.signal(signal.SIGTERM)
    assert sampler.wait() == 0
    texts = [event.text for event in sampler.part().events if event.kind == "fault"]
    assert texts[0] == "injected: driver-hang"
    assert texts[1].startswith("the drivers: no answer in the last ")
    assert len(texts) == 2


def test_drivers_that_cannot_be_used_are_an_event(start_sampler, until):
    sampler = start_sampler(fault="driver")
    until(lambda: "injected: the drivers cannot be used" in sampler.faults())
    sampler.signal(signal.SIGTERM)
    assert sampler.part().devices == ()


def test_a_sampler_dies_when_it_is_to(start_sampler, start_task):
    start_task(start_sampler.attempt, 0)
    sampler = start_sampler(fault="die@0.3")
    assert os.WTERMSIG(sampler.wait()) == signal.SIGKILL
    found = sampler.journal()
    assert not found.ended
    assert found.devices[0].times
    assert sampler.faults() == ["injected: die@0.3"]


def test_a_disk_that_is_full_loses_what_comes_then(start_sampler, start_task, until):
    start_task(start_sampler.attempt, 0)
    sampler = start_sampler(fault="disk@0.3")
    until(lambda: sampler.journal().devices)
    until(sampler.stands_still)
    sampler.signal(signal.SIGTERM)
    node = sampler.part()
    assert "injected: disk@0.3" in [event.text for event in node.events]
    assert node.events[-1].text == "ended without a word: killed, or the node went down"
    assert len(node.devices[0].samples["time_seconds"]) >= 1
