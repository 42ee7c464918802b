"""The page, as text and in a real browser."""

import dataclasses
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from trimtab.protocol import Stack
from trimtab.report import page
from trimtab.report.chain import linked, run_of
from trimtab.report.find import load
from trimtab.report.summarize import summarize
from trimtab.report.summary import Attempt
from trimtab.stacks import stack_text
from trimtab_slurm import profile as profile_file
from trimtab_slurm.contents import Event

pytest.importorskip("plotly", reason="the report extra is not installed")

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
HOSTILE = "</script><script>window.owned = 1</script><img src=x onerror='window.owned = 1'>\x1b[31m\n{{ 7 * 7 }} \u202e"


def render(profile):
    return page.render(profile, summarize(profile))


def hostile(profile, trimmed):
    """The profile with hostile text wherever a job, its user or a node can put text."""
    training = trimmed(profile, step=11).training
    orders = {
        name: np.array([HOSTILE] * 2) if column.dtype.kind == "U" else column
        for name, column in training.orders.items()
    }
    stack = stack_text(Stack(0, 1, HOSTILE))
    training = dataclasses.replace(
        training,
        attributes=profile.training.attributes | {"outcome": HOSTILE, "exit_code": 3},
        events=(Event(profile.start_seconds + 1, HOSTILE, HOSTILE), Event(profile.start_seconds, "stack", stack)),
        orders=orders,
        ranks=profile.training.ranks | {"layers": np.array([HOSTILE] * 4), "node": np.array([HOSTILE] * 4)},
    )
    device = dataclasses.replace(profile.nodes[0].devices[0], model=HOSTILE, kind="gpu", uuid=HOSTILE)
    node = dataclasses.replace(profile.nodes[0], node=HOSTILE, devices=(device,))
    return dataclasses.replace(profile, user=HOSTILE, cluster=HOSTILE, training=training, nodes=(node,))


class Elements(HTMLParser):
    """Start tags of a page, and its text outside of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self._inside = [], "", ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        self.text += " "

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside not in ("script", "style"):
            self.text += data


def test_the_page_answers_first(profile):
    text = " ".join(Elements(render(profile)).text.split())
    order = ["finished", "Trained to step 30", "Imbalance 17.2%", "Cost of imbalance 3.3 s", "What to change", "Stages"]
    positions = [text.index(part) for part in order]
    assert positions == sorted(positions)


def test_hostile_text_is_text(profile, profiles):
    whole = render(hostile(profile, profiles.trimmed))
    elements = Elements(whole)
    assert [tag for tag, _ in elements.tags if tag == "img"] == []
    assert len([tag for tag, _ in elements.tags if tag == "script"]) == 3  # data, plotly, our own
    assert not any(name.startswith("on") for _, attributes in elements.tags for name in attributes)
    assert (
        "</script><script>window.owned = 1</script><img src=x onerror='window.owned = 1'> {{ 7 * 7 }}" in elements.text
    )
    assert "\x1b" not in whole.replace("\\x1b", "")
    assert "\u202e" not in elements.text


def test_nothing_is_loaded_and_only_the_known_scripts_may_run(profile):
    elements = Elements(render(profile))
    assert not any(re.match("(https?:)?//", value or "") for _, at in elements.tags for value in at.values())
    assert {at["href"] for tag, at in elements.tags if tag == "link"} == {"data:,"}
    (policy,) = [at["content"] for tag, at in elements.tags if at.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.partition("style-src")[0]
    assert "unsafe-eval" not in policy


def test_no_data_is_a_reason_and_not_a_number(profile):
    text = Elements(render(dataclasses.replace(profile, nodes=()))).text
    assert "no data: the node left no record" in text
    assert "no node left a record" in text


def test_a_figure_that_is_not_there_says_why_and_one_of_throttling_by_what(profile):
    samples = profile.nodes[0].devices[0].samples | {"throttle_reasons_bits": np.repeat([0.0, 4.0], 30)}
    device = dataclasses.replace(profile.nodes[0].devices[0], kind="gpu", samples=samples)
    node = dataclasses.replace(profile.nodes[0], devices=(device,))
    cells = [
        at.get("title") for tag, at in Elements(render(dataclasses.replace(profile, nodes=(node,)))).tags if tag == "td"
    ]
    assert "a processor's tasks have no power of their own" in cells
    assert "50.0% power cap" in cells


def chained(profile, profiles):
    """The summary of a second attempt, with a change of setting, as a job id gives it; and its profile."""
    first = profiles.until(profile, 20, 75, "stopped")
    second = profiles.trimmed(profiles.resumed(profile, first_step=16, start=100.0, restart_count=1), step=21)
    attempts = [
        Attempt(
            number, each.start_seconds, each.end_seconds - each.start_seconds, "stopped", HOSTILE, "x", ("n1",), "TP2"
        )
        for number, each in ((1, first), (2, second))
    ]
    found, chain = linked(attempts, [run_of(first.training), run_of(second.training)])
    return dataclasses.replace(summarize(second), attempts=found, chain=chain, attempt_number=2), second


def test_orders_settings_and_the_chain_are_on_the_page(profile, profiles):
    summary, second = chained(profile, profiles)
    elements = Elements(page.render(second, summary))
    text = " ".join(elements.text.split())
    assert (
        "move layers 4|4 -> 5|3 stage 1 takes 17.2% longer than the median stage 1,500 1,180 1,200 0.25 s 3 MiB" in text
    )
    assert "refused: 8 microbatches do not fit" in text
    assert "A step takes 20.0% less time than at first: 1,200 ms instead of 1,500 ms" in text
    assert "2 21-30 1,200 3.4%" in text
    assert "5 steps were taken again after a resume, with the same losses." in text
    assert [tag for tag, _ in elements.tags if tag == "img"] == []


def test_the_state_is_not_said_twice_on_the_page(profile, profiles):
    def said(**attributes):
        return " ".join(Elements(render(profiles.change(profile, attributes=attributes))).text.split())

    assert "stopped by SIGUSR1 at step 9 of 30 exit code 75 Imbalance" in said(
        exit_code=75, outcome="stopped by SIGUSR1 at step 9 of 30"
    )
    assert "finished Trained to step 30 Imbalance" in said()


def test_stacks_are_collapsed_with_their_lines_and_equal_ones_together(profile):
    texts = ["  File a\n    wait()", "  File b\n    read()", "  File a\n    wait()"]
    events = tuple(Event(1.0, "stack", stack_text(Stack(rank, 9, text))) for rank, text in enumerate(texts))
    whole = render(dataclasses.replace(profile, training=dataclasses.replace(profile.training, events=events)))
    elements = Elements(whole)
    assert [dict(at) for tag, at in elements.tags if tag == "details"] == [{}, {}]
    assert "<summary>1 rank: 1</summary><pre>  File b\n    read()</pre>" in whole
    assert "<summary>2 ranks: 0,2</summary>" in whole


def test_a_chart_without_anything_to_draw_is_left_out(profiles, profile):
    def charts(shown):
        return {
            at["id"]
            for tag, at in Elements(render(shown)).tags
            if tag == "div" and at.get("id", "").startswith("chart-")
        }

    assert charts(profile) == {"chart-stages", "chart-imbalance", "chart-loss", "chart-devices"}
    assert charts(dataclasses.replace(profile, training=None)) == {"chart-devices"}
    assert charts(dataclasses.replace(profile, nodes=())) == {"chart-stages", "chart-imbalance", "chart-loss"}
    assert charts(profiles.make(pipeline=1)) == {"chart-stages", "chart-loss", "chart-devices"}
    assert charts(profiles.make(steps=0)) == {"chart-devices"}


def test_a_large_job_makes_no_large_page(profiles):
    """1,024 ranks in 16 stages, a day of steps, an hour of samples each second."""
    profile = profiles.make(tensor=8, pipeline=16, data=8, layers=64, ranks_per_node=8, steps=2500, seconds=3600)
    from plotly.offline import get_plotlyjs

    assert len(render(profile)) - len(get_plotlyjs()) < 8_000_000


def test_of_longer_tables_the_rows_that_matter_are_shown(profiles, monkeypatch):
    profile = profiles.make(tensor=1, pipeline=2, data=2, slow=(1, 0, 1.5))  # its stages take 0.6, 0.85, 0.9, 0.85 s
    monkeypatch.setattr(page, "MOST_ROWS", 3)
    text = " ".join(Elements(render(profile)).text.split())
    stages = text.partition("Peak memory")[2].partition(" 1 that compute less")[0]
    assert stages.split("GiB")[:3] == [
        " 0 1 4-7 + LM head 283 567 850 43.3% 2.0 ",
        " 1 0 0-3 + embedding 300 600 900 40.0% 1.0 ",
        " 1 1 4-7 + LM head 283 567 850 43.3% 2.0 ",
    ]
    assert "1 that were used more are in" in text


def test_a_page_is_written_whole_or_not_at_all(profile, tmp_path, monkeypatch):
    profile_file.write(tmp_path / "one.h5", profile)
    (recorded,) = load(str(tmp_path / "one.h5"), None, None)
    target = tmp_path / "report.html"
    target.write_text("before")

    def fail(*_):
        raise OSError("no space")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        page.write(target, recorded)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.h5", "report.html"]
    assert target.read_text() == "before"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A headless Chromium that logs console and network."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if not (CHROMIUM and DRIVER):
        pytest.skip("needs Chromium and its driver (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={tmp_path_factory.mktemp('browser')}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def opened(browser, profile, directory, *, width=1280, height=800, scheme="light"):
    """Open the page; returns what the browser complained of, and the addresses that the page asked for."""
    file = directory / "report.html"
    file.write_text(render(profile))
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    return visit(browser, file)


def visit(browser, file):
    """Open a file; returns as `opened`."""
    for log in ("browser", "performance"):
        browser.get_log(log)
    browser.get(file.as_uri())
    sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [one["params"] for one in sent if one["method"] == "Network.requestWillBeSent"]
    asked = {request["request"]["url"] for request in requests if request["documentURL"] == file.as_uri()}
    assert file.as_uri() in asked
    return browser.get_log("browser"), sorted(url for url in asked - {file.as_uri()} if not url.startswith("data:"))


def drawn(browser):
    """Chart -> how many lines, markers or images it has drawn, by what the browser has in its document."""
    return browser.execute_script(
        """
        return Object.fromEntries([...document.querySelectorAll("[id^=chart-]")].map((chart) => [
          chart.id.slice(6),
          [...chart.querySelectorAll(".scatterlayer path.js-line, .scatterlayer path.point, .heatmaplayer image")]
            .filter((mark) => { const box = mark.getBoundingClientRect(); return box.width + box.height > 0; }).length,
        ]));
        """
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_a_browser_draws_every_chart_without_complaint_or_request(browser, profile, tmp_path, width, height, scheme):
    complaints, requests = opened(browser, profile, tmp_path, width=width, height=height, scheme=scheme)
    assert complaints == []
    assert requests == []
    assert drawn(browser) == {"stages": 2, "imbalance": 2, "loss": 2, "devices": 1}
    overflow = browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
    assert overflow <= 0, "the page scrolls sideways"


def test_the_answer_is_on_the_first_screen_of_a_laptop(browser, profile, tmp_path):
    opened(browser, profile, tmp_path, width=1366, height=768)
    bottom = browser.execute_script("return document.querySelector('.advice').getBoundingClientRect().bottom")
    assert bottom < 768


def test_the_colors_follow_the_browser_when_they_change(browser, profile, tmp_path):
    def line_color():
        return browser.execute_script(
            "return getComputedStyle(document.querySelector('#chart-stages path.js-line')).stroke"
        )

    opened(browser, profile, tmp_path)
    light = line_color()
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    browser.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 50))")
    assert line_color() != light


@pytest.mark.parametrize(
    "partial",
    ["no training", "no nodes", "two steps", "no step", "one stage", "no finite loss", "no sample", "64 ranks"],
)
def test_a_browser_shows_partial_and_large_data_without_complaint(browser, profile, profiles, tmp_path, partial):
    nothing = [
        dataclasses.replace(
            node,
            devices=tuple(
                dataclasses.replace(device, samples={name: column[:0] for name, column in device.samples.items()})
                for device in node.devices
            ),
        )
        for node in profile.nodes
    ]
    shown, charts = {
        "no training": (dataclasses.replace(profile, training=None), {"devices": 1}),
        "no nodes": (dataclasses.replace(profile, nodes=()), {"stages": 2, "imbalance": 2, "loss": 2}),
        "two steps": (profiles.make(steps=2, exit_code=3), {"stages": 2, "imbalance": 2, "loss": 2, "devices": 1}),
        "no step": (profiles.make(steps=0, exit_code=3), {"devices": 1}),
        "one stage": (profiles.make(pipeline=1), {"stages": 1, "loss": 2, "devices": 1}),
        "no finite loss": (
            profiles.change(profile, steps={"loss": np.full(30, np.nan)}),
            {"stages": 2, "imbalance": 2, "loss": 1, "devices": 1},
        ),
        "no sample": (
            dataclasses.replace(profile, nodes=tuple(nothing)),
            {"stages": 2, "imbalance": 2, "loss": 2},
        ),
        "64 ranks": (
            profiles.make(tensor=2, pipeline=8, data=4, ranks_per_node=8, steps=3000, seconds=1000),
            {"stages": 8, "imbalance": 2, "loss": 2, "devices": 1},
        ),
    }[partial]
    complaints, _ = opened(browser, shown, tmp_path)
    assert complaints == []
    assert drawn(browser) == charts


def test_a_browser_draws_the_chain_and_marks_where_settings_began(browser, profile, profiles, tmp_path):
    summary, second = chained(profile, profiles)
    file = tmp_path / "report.html"
    file.write_text(page.render(second, summary))
    assert visit(browser, file) == ([], [])
    assert drawn(browser) == {"chain": 2, "stages": 2, "imbalance": 2, "loss": 2, "devices": 1}
    marks = browser.execute_script(
        "return [...document.querySelectorAll('[id^=chart-]')].map((chart) => [chart.id.slice(6), "
        "[...chart.querySelectorAll('.annotation-text')].map((text) => text.textContent).join()])"
    )
    assert dict(marks) == {"chain": "attempt 2", "stages": "2", "imbalance": "2", "loss": "2", "devices": "2"}


def test_hostile_text_does_not_run_in_a_browser(browser, profile, profiles, tmp_path):
    complaints, requests = opened(browser, hostile(profile, profiles.trimmed), tmp_path)
    assert complaints == []
    assert requests == []
    assert browser.execute_script("return typeof window.owned") == "undefined"
    assert drawn(browser)["stages"] == 2


def test_a_script_that_slipped_through_would_not_run(browser, profile, tmp_path):
    file = tmp_path / "report.html"
    smuggled = "<script>window.owned = 1</script><img src='other.png'></main>"
    file.write_text(render(profile).replace("</main>", smuggled))
    complaints, _ = visit(browser, file)
    assert len(complaints) == 2  # the browser says of both that the page's policy forbids them
    assert all("Content Security Policy" in complaint["message"] for complaint in complaints)
    assert browser.execute_script("return typeof window.owned") == "undefined"


def test_a_request_would_be_noticed(browser, tmp_path):
    file = tmp_path / "report.html"
    (tmp_path / "other.css").write_text("")
    file.write_text("<!doctype html><link rel=icon href='data:,'><link rel=stylesheet href=other.css>")
    assert visit(browser, file) == ([], [(tmp_path / "other.css").as_uri()])
