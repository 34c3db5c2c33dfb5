"""The page in a browser: every interaction, and its numbers against metrics.jsonl."""

from __future__ import annotations

import json
import math
import re
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_train.archive.report import page as module
from ddp_train.archive.report.page import collect, page
from tests.unit.archive.report.browser import Browser
from tests.unit.archive.report.run_files import write_lines, write_run, write_sweep


def write_page(file: Path, *folders: Path) -> Path:
    file.write_text(page(collect(folders), title="a <title> & more"))
    return file


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    return write_page(folder / "report.html", write_run(folder / "run", nans=(40, 41, 42)))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    return write_page(folder / "report.html", write_sweep(folder / "sweep"))


def records(folder: Path, split: str) -> list[dict[str, Any]]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["split"] == split]


def fragment(browser: Browser) -> dict[str, str]:
    return dict(browser.run("[...new URLSearchParams(location.hash.slice(1))]"))


def over(browser: Browser, panel: str) -> tuple[float, float, float, float]:
    """Return the place of a panel's curves, which are drawn when they are in sight."""
    browser.box(f'[data-panel="{panel}"]')
    browser.wait(f"document.querySelector('[data-panel=\"{panel}\"] .u-over') !== null")
    return browser.box(f'[data-panel="{panel}"] .u-over')


def shown_values(browser: Browser) -> list[dict[str, Any]]:
    found = browser.run("[...document.querySelectorAll('.tip [data-value]')].map(e => ({...e.dataset}))")
    return [{**row, "x": float(row["x"]), "value": float(row["value"])} for row in found]


def test_hovering_shows_the_values_of_metrics_jsonl(browser: Browser, one: Path) -> None:
    browser.open(one)
    rows = {row["step"]: row for row in records(one.parent / "run", "train")}
    left, top, width, height = over(browser, "loss")
    seen = set()
    for share in (0.02, 0.3, 0.5, 0.68, 0.98):
        browser.move(left + share * width, top + height / 2)
        value = next(row for row in shown_values(browser) if row["key"] == "train/loss")
        expected = rows[round(value["x"])]["loss"]
        assert math.isnan(value["value"]) if expected is None else value["value"] == pytest.approx(expected, rel=1e-6)
        seen.add(expected is None)
        assert browser.run("document.querySelector('[data-panel=\"train/lr\"] .readout').textContent") != ""  # in every other panel, too
    assert seen == {True, False}
    browser.move(5, 5)
    assert browser.run("document.querySelector('.tip').hidden")


@pytest.mark.parametrize(
    ("axis", "of"), [("samples", lambda row: row["samples"]), ("epoch", lambda row: row["epoch"]), ("time", lambda row: row["step"] - 1)]
)
def test_the_horizontal_axis_is_chosen(browser: Browser, one: Path, axis: str, of: Any) -> None:
    browser.open(one)
    browser.click_on(f'[data-axis-name="{axis}"]')
    assert fragment(browser) == {"x": axis}
    left, top, width, height = over(browser, "train/lr")
    browser.move(left + 0.5 * width, top + height / 2)
    value = shown_values(browser)[0]
    assert min(abs(of(row) - value["x"]) for row in records(one.parent / "run", "train")) < 0.02
    browser.click_on('[data-axis-name="step"]')
    assert fragment(browser) == {}


def test_dragging_zooms_all_curves_and_a_double_click_resets(browser: Browser, one: Path) -> None:
    browser.open(one)
    left, top, width, height = over(browser, "loss")
    browser.drag((left + 0.25 * width, top + 40), (left + 0.5 * width, top + 60))
    low, high = map(float, fragment(browser)["z"].split("~"))
    assert (low, high) == (pytest.approx(1 + 0.25 * 59, abs=0.6), pytest.approx(1 + 0.5 * 59, abs=0.6))
    left, top, width, height = over(browser, "train/lr")  # another one
    for share, expected in ((0.01, low), (0.99, high)):
        browser.move(left + share * width, top + height / 2)
        assert shown_values(browser)[0]["x"] == pytest.approx(expected, abs=1)
    browser.click(left + 0.5 * width, top + height / 2, times=2)
    assert fragment(browser) == {}
    browser.drag((left + 0.1 * width, top + 40), (left + 0.2 * width, top + 40))
    browser.press("Escape")
    assert fragment(browser) == {}
    browser.drag((left + 0.1 * width, top + 40), (left + 0.2 * width, top + 40))
    browser.click_on("#reset")
    assert fragment(browser) == {}


def test_smoothing_is_a_debiased_mean_that_keeps_nan(browser: Browser, one: Path) -> None:
    browser.open(one, fragment="#s=0.9")
    assert browser.run("document.querySelector('#smooth').value") == "0.9"
    left, top, width, height = over(browser, "loss")
    browser.move(left + 0.5 * width, top + height / 2)
    shown = next(row for row in shown_values(browser) if row["key"] == "train/loss")
    text = browser.run("document.querySelector('.tip [data-key=\"train/loss\"] + small').textContent")
    mean, weight = 0.0, 0.0
    for row in records(one.parent / "run", "train")[: round(shown["x"])]:
        mean, weight = 0.9 * mean + 0.1 * row["loss"], 0.9 * weight + 0.1
    assert float(text.removeprefix("mean ")) == pytest.approx(mean / weight, rel=1e-3)
    browser.move(left + 40 / 60 * width, top + height / 2)
    assert "mean NaN" in browser.run("document.querySelector('.tip').textContent")


def test_state_is_in_the_address_and_survives_a_reload(browser: Browser, one: Path) -> None:
    browser.open(one)
    for name in ("ly", "lx"):
        browser.click_on(f'[data-state="{name}"]')
    browser.type("#metrics", "loss")
    browser.click_on('[data-kind="spike"]')
    browser.run("(() => { const e = document.querySelector('#smooth'); e.value = 0.5; e.dispatchEvent(new Event('input')); })()")
    browser.settle()
    assert fragment(browser) == {"ly": "1", "lx": "1", "m": "loss", "k": "spike", "s": "0.5"}
    browser.call("Page.reload")
    time.sleep(0.3)
    browser.wait("document.documentElement?.dataset.ready === 'yes'")
    browser.settle()
    assert browser.run("document.querySelector('[data-state=ly]').checked && document.querySelector('#metrics').value") == "loss"
    assert browser.run("[...document.querySelectorAll('.chart')].filter(e => !e.hidden).map(e => e.dataset.panel)") == ["loss"]
    assert browser.run("document.querySelector('[data-kind=spike]').getAttribute('aria-pressed')") == "false"
    browser.run("location.hash = '#x=epoch'")  # as a link or the back button does
    browser.wait("document.querySelector('[data-axis-name=epoch]').getAttribute('aria-checked') === 'true'")
    assert browser.run("document.querySelectorAll('.chart:not([hidden])').length") > 1


def test_a_curve_is_read_and_zoomed_by_keyboard(browser: Browser, one: Path) -> None:
    browser.open(one)
    browser.run("document.querySelector('[data-panel=\"train/lr\"]').focus()")
    browser.press("Home")
    assert shown_values(browser)[0]["x"] == 1
    for _ in range(3):
        browser.press("ArrowRight")
    browser.press("ArrowLeft")
    assert shown_values(browser)[0]["x"] == 3
    browser.press("+", text="+")
    low, high = map(float, fragment(browser)["z"].split("~"))
    assert low <= 3 <= high < 40
    browser.press("-", text="-")
    assert fragment(browser) == {}
    browser.press("+", text="+")
    browser.press("Escape")
    assert fragment(browser) == {}


def test_tab_reaches_every_control_in_order(browser: Browser, one: Path) -> None:
    browser.open(one)
    browser.run("document.activeElement.blur()")
    seen = []
    for _ in range(60):
        browser.press("Tab")
        name = "e.id || e.dataset.axisName || e.dataset.state || e.dataset.panel || e.getAttribute('href') || e.tagName"
        seen.append(browser.run(f"(e => {name})(document.activeElement)"))
    expected = ["#curves", "theme", "step", "smooth", "ly", "lx", "metrics", "loss", "eval/accuracy", "train/lr"]
    places = [seen.index(name) for name in expected]
    assert places == sorted(places)
    assert "outline" in browser.run(
        "[...document.styleSheets].flatMap(s => [...s.cssRules]).find(r => r.selectorText === ':focus-visible').cssText"
    )


def test_light_and_dark_follow_the_system_and_the_switch(browser: Browser, one: Path) -> None:
    for dark in (False, True):
        browser.open(one, dark=dark)
        theme = "dark" if dark else "light"
        assert browser.run("document.documentElement.dataset.theme") == theme
        ground = browser.run("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground))) < 200) is dark
        browser.click_on("#theme")
        assert browser.run("document.documentElement.dataset.theme") != theme
        assert fragment(browser) == {"t": "light" if dark else "dark"}


@pytest.mark.parametrize("width", [390, 768, 1400])
def test_no_page_scrolls_sideways(browser: Browser, one: Path, sweep: Path, width: int) -> None:
    for file in (one, sweep):
        browser.open(file, width=width)
        assert browser.run("document.documentElement.scrollWidth") <= width


def test_every_control_has_a_name(browser: Browser, one: Path, sweep: Path) -> None:
    nameless = """[...document.querySelectorAll('button, input, select, a, [tabindex="0"], svg[role]')].filter(e => !(
        e.getAttribute('aria-label') || e.textContent.trim() || e.closest('label')?.textContent.trim()
    )).map(e => e.outerHTML.slice(0, 120))"""
    for file in (one, sweep):
        browser.open(file)
        assert browser.run(nameless) == []


def test_printing_shows_all_curves_in_light(browser: Browser, one: Path) -> None:
    browser.open(one, dark=True)
    pdf = browser.call("Page.printToPDF", printBackground=True)["data"]
    assert len(pdf) > 20_000
    browser.settle()
    assert browser.run("document.documentElement.dataset.theme") == "dark"


def test_marks_goodput_and_the_heat_map_are_there(browser: Browser, one: Path) -> None:
    browser.open(one)
    left, top, width, height = over(browser, "loss")
    browser.move(left + 19 / 59 * width, top + height / 2)
    assert "spike at step 20: loss 9, zscore 8.5, samples 1, 2, 3" in browser.run("document.querySelector('.tip').textContent")
    assert browser.run("document.querySelector('#goodput').textContent") == f"{100 * 60 / 70:.1f} %"  # of 70 s since the start
    assert "communication is not split: gloo" in browser.run("document.querySelector('#time').textContent")
    left, top, width, height = browser.box("#time svg:last-of-type[aria-label*='by rank']")
    browser.move(left + 0.9 * width, top + 0.4 * height)
    text = browser.run("document.querySelector('.tip').textContent")
    assert "rank 1 on b" in text and "own time: 0.76 s a step" in text


def test_a_slow_rank_is_named_below_the_map_and_its_compute_can_be_chosen(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    event = {"kind": "slow_rank", "step": 30, "rank": 1, "host": "b", "cause": "compute", "text": "rank 1 on b by its compute: look at it"}
    write_lines(run / "events.jsonl", [event])
    browser.open(write_page(tmp_path / "report.html", run))
    assert browser.run("document.querySelector('#time p.slow').textContent") == "step 30: rank 1 on b by its compute: look at it"
    parts = browser.run("[...document.querySelectorAll('#time label:has(select) option')].map(e => e.textContent)")
    assert parts[:3] == ["own time", "compute", "data"]
    assert "compute is forward, backward, optimizer and other." in browser.run("document.querySelector('#time').textContent")
    browser.open(tmp_path / "report.html", fragment="#heat=compute")
    left, top, width, height = browser.box("#time svg:last-of-type[aria-label*='by rank']")
    browser.move(left + 0.9 * width, top + 0.4 * height)
    assert "compute: 0.75 s a step" in browser.run("document.querySelector('.tip').textContent")


def test_predictions_are_those_that_were_saved(browser: Browser, one: Path) -> None:
    import numpy as np

    folder = one.parent / "run/predictions/step_00000060"
    target, answer = (np.load(folder / f"{name}.npy") for name in ("target", "prediction"))
    browser.open(one)
    left, top, width, _ = browser.box("svg.confusion")
    cell = width * 34 / (48 + 5 * 34 + 10)
    browser.move(left + width * 48 / 228 + 1.5 * cell, top + 2.6 * cell)
    assert f"2 taken for 1{np.sum((target == 2) & (answer == 1))} of {np.sum(target == 2)}" in browser.run(
        "document.querySelector('.tip').textContent"
    )
    text = browser.run("document.querySelector('#evaluation').textContent")
    assert f"accuracy {np.mean(target == answer):.5g}" in text


def test_the_table_is_sorted_filtered_and_picked(browser: Browser, sweep: Path) -> None:
    first = "document.querySelector('table.runs tbody tr').dataset.run"
    browser.open(sweep)
    accuracy = [records(sweep.parent / f"sweep/{number}", "eval")[-1]["accuracy"] for number in range(6)]
    best = max(range(6), key=accuracy.__getitem__)
    assert browser.run(first) == str(best)
    shown = browser.run("[...document.querySelectorAll('table.runs tbody tr:first-child td')].map(e => e.textContent)")
    assert f"{accuracy[best]:.6g}" in shown
    browser.click_on('th button[title="optimizer.lr"]')
    assert browser.run(first) == "0" and fragment(browser)["sort"] == "optimizer.lr~a"
    browser.click_on('th button[title="optimizer.lr"]')
    assert browser.run(first) == "4" and fragment(browser)["sort"] == "optimizer.lr~d"
    browser.type("#filter", "lr>0.03 seed=1")
    assert browser.run("[...document.querySelectorAll('table.runs tbody tr')].map(e => e.dataset.run)") == ["5", "3"]
    assert browser.run("document.querySelectorAll('.parallel .run').length") == 2
    browser.run("(() => { const e = document.querySelector('#filter'); e.value = ''; e.dispatchEvent(new Event('input')); })()")
    browser.settle()
    browser.click_on('table.runs tbody tr[data-run="3"] input')
    assert fragment(browser)["off"] == "3" and browser.run("document.querySelectorAll('.pareto circle').length") == 5
    browser.click_on('table.runs tbody tr[data-run="2"] button.link')
    assert fragment(browser)["run"] == "2"
    assert "optimizer.lr=0.05" in browser.run("document.querySelector('#reproduce').textContent")


def test_one_brush_is_seen_in_all_views(browser: Browser, sweep: Path) -> None:
    bright = "[...document.querySelectorAll('{}')].filter(e => !e.classList.contains('dim')).map(e => e.dataset.run).sort()"
    views = ("table.runs tbody tr", ".parallel .run", ".pareto circle")
    browser.open(sweep)
    left, top, width, height = browser.box('[data-axis="optimizer.lr"] .hit')
    browser.drag((left + width / 2, top + 3), (left + width / 2, top + 0.75 * height))  # the upper part of the axis
    assert [browser.run(bright.format(view)) for view in views] == [["2", "3", "4", "5"]] * 3
    assert browser.run("document.querySelector('#runs .chip').textContent").startswith("optimizer.lr: ")
    left, top, width, height = browser.box(".pareto .hit")
    browser.drag((left + 2, top + 2), (left + width - 2, top + 0.2 * height))  # high accuracies
    chosen = browser.run(bright.format(views[0]))
    assert 0 < len(chosen) < 4 and [browser.run(bright.format(view)) for view in views] == [chosen] * 3
    saved = browser.run("location.hash")
    browser.open(sweep, fragment=saved)
    assert [browser.run(bright.format(view)) for view in views] == [chosen] * 3
    while browser.run("document.querySelector('#runs .chip') !== null"):
        browser.click_on("#runs .chip")
    assert fragment(browser) == {}
    browser.run("document.querySelector('[data-axis=\"optimizer.lr\"]').focus()")
    browser.press("ArrowUp")
    assert [browser.run(bright.format(view)) for view in views] == [["2", "3", "4", "5"]] * 3
    browser.press("ArrowDown")
    assert browser.run(bright.format(views[0])) == ["2", "3"]
    browser.press("Escape")
    assert fragment(browser) == {}


def test_hovering_a_run_lights_it_in_every_view(browser: Browser, sweep: Path) -> None:
    browser.open(sweep)
    left, top, width, height = browser.box('.pareto circle[data-run="3"]')
    browser.move(left + width / 2, top + height / 2)
    assert browser.run("document.querySelector('table.runs tr.hover').dataset.run") == "3"
    assert browser.run("document.querySelector('.parallel .run.hover').dataset.run") == "3"
    browser.move(4, 4)
    assert browser.run("document.querySelector('table.runs tr.hover')") is None
    browser.click_on('.pareto circle[data-run="1"]')
    assert fragment(browser)["run"] == "1"


def test_groups_over_seeds_have_student_s_interval(browser: Browser, sweep: Path) -> None:
    from statistics import fmean, stdev

    browser.open(sweep)
    browser.click_on("#group")
    assert fragment(browser) == {"g": "1"}
    ends = [records(sweep.parent / f"sweep/{number}", "eval")[-1]["accuracy"] for number in (4, 5)]
    half = 12.706 * stdev(ends) / math.sqrt(2)
    text = browser.run("document.querySelector('.group').textContent")
    assert text.startswith(f"optimizer.lr=0.1{fmean(ends):.5g}") and f"± {half:.2g}" in text
    left, top, width, height = over(browser, "eval/accuracy")
    browser.move(left + width - 2, top + height / 2)
    rows = shown_values(browser)
    assert len(rows) == 3 and any(row["value"] == pytest.approx(fmean(ends), rel=1e-6) for row in rows)


def test_samples_that_flip_between_two_runs(browser: Browser, sweep: Path) -> None:
    import numpy as np

    answers = [np.load(sweep.parent / f"sweep/{number}/predictions/step_00000060/prediction.npy") for number in (0, 1)]
    target = np.arange(200) % 5
    here, there = (answer == target for answer in answers)
    browser.open(sweep, fragment="#run=0&vs=1")
    assert browser.run("document.querySelector('[data-flips]').dataset.flips") == f"{np.sum(here & ~there)} {np.sum(~here & there)}"


def test_differences_of_the_configuration_are_marked(browser: Browser, sweep: Path) -> None:
    browser.open(sweep, fragment="#run=0&d=1")
    assert browser.run("[...document.querySelectorAll('#config .leaf')].map(e => e.dataset.key)") == ["optimizer.lr", "seed"]
    assert "0.05" in browser.run("document.querySelector('#config [data-key=\"optimizer.lr\"] small').textContent")


def test_a_failed_run_tells_why_and_a_job_of_a_sweep_has_its_own_command(browser: Browser, tmp_path: Path) -> None:
    run, other = write_run(tmp_path / "run"), write_run(tmp_path / "other", seed=1)
    result = json.loads((run / "result.json").read_text()) | {"status": "failed", "error": "ValueError: no such shape"}
    (run / "result.json").write_text(json.dumps(result))
    environment = json.loads((run / "environment.json").read_text())
    environment |= {"command": "/bin/ddp-train -m optimizer.lr=0.1,0.2", "overrides": ["optimizer.lr=0.1", "name=a b"]}
    (run / "environment.json").write_text(json.dumps(environment))
    (run / "times.jsonl").unlink()
    (run / "metrics.jsonl").unlink()
    browser.open(write_page(tmp_path / "report.html", run, other), fragment="#run=0")
    assert "run: ValueError: no such shape" in browser.run("document.querySelector('#overview').textContent")
    text = browser.run("document.querySelector('#reproduce').textContent")
    assert "ddp-train optimizer.lr=0.1 'name=a b'" in text and "0.1,0.2" not in text


def test_the_command_is_copied(browser: Browser, one: Path) -> None:
    browser.open(one)
    browser.click_on("#reproduce .copy")
    browser.wait("document.querySelector('#reproduce .copy').textContent === 'Copied'")


def test_a_run_that_has_left_little_is_shown(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for name in ("result.json", "times.jsonl", "events.jsonl", "environment.json"):
        (run / name).unlink()
    write_lines(run / "metrics.jsonl", records(run, "train")[:1])
    (run / "result.json").write_text('{"status": "comp')  # cut
    (run / "predictions/step_00000060/target.npy").write_bytes(b"no numbers")
    empty = tmp_path / "empty"
    empty.mkdir()
    browser.open(write_page(tmp_path / "report.html", run, empty))
    text = browser.run("document.querySelector('#overview').textContent")
    assert "result.json cannot be read" in text and "config.yaml is missing" in text and "predictions cannot be read" in text


def test_a_zoom_of_no_width_and_equal_values_hang_nothing(browser: Browser, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(number), seed=number, lr=0.1) for number in range(3)]
    for number, run in enumerate(runs):
        result = json.loads((run / "result.json").read_text())
        result["metrics"]["last"] = {"eval/accuracy": 0.5 + number * 1e-16, "train/loss": 0.3}
        (run / "result.json").write_text(json.dumps(result))
    for state in ("", "#z=20~20.0000000001&s=0.5", "#ly=1&lx=1&z=0~1e-30&s=0.99"):
        browser.open(write_page(tmp_path / "report.html", *runs), fragment=state)
        browser.box('[data-panel="train/lr"]')


def test_infinite_values_of_the_configuration_are_shown(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", health={"spike_zscore": math.inf})
    browser.open(write_page(tmp_path / "report.html", run))
    assert browser.run("document.querySelector('[data-key=\"health.spike_zscore\"] .value').textContent") == "Infinity"


def test_what_runs_are_named_is_text_and_never_html(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "<img src=x onerror=alert(1)>", name="</script><b>bold</b>")
    browser.open(write_page(tmp_path / "report.html", run))
    assert browser.run("document.title") == "a <title> & more"
    assert browser.run("document.querySelectorAll('img, main > b').length") == 0


def test_runs_of_different_settings_are_no_repeats_of_each_other(browser: Browser, tmp_path: Path) -> None:
    """Not even where the key is none of the columns; a fold is a repeat, and how samples are read is no setting."""
    many = {f"key_{number:02}": number for number in range(12)}
    first = write_run(tmp_path / "a", **dict.fromkeys(many, 0), last=0)
    others = [write_run(tmp_path / f"{last}{seed}", seed=seed, **many, last=last) for last in (1, 2) for seed in (1, 2)]
    browser.open(write_page(tmp_path / "report.html", first, *others))
    assert browser.run("document.querySelectorAll('.group').length") == 3
    assert [each.group for each in collect([first, *others])] == [0, 1, 1, 2, 2]
    folds = [
        write_run(tmp_path / f"{lr}_{fold}", data={"fold": fold}, loader={"num_workers": fold}, optimizer={"lr": lr})
        for lr, fold in ((0.1, 0), (0.1, 1), (0.2, 0))
    ]
    assert [each.group for each in collect(folds)] == [0, 0, 1]
    browser.open(write_page(tmp_path / "report.html", *folds))
    names = browser.run("[...document.querySelectorAll('.group > span:first-child')].map(e => e.textContent)")
    assert sorted(names) == ["optimizer.lr=0.1", "optimizer.lr=0.2"]


def test_damaged_files_are_said_and_the_rest_is_shown(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "predictions/step_00000060/prediction.npy").write_bytes(b"")
    times = (run / "times.jsonl").read_text()
    (run / "times.jsonl").write_text(times.replace("[0.01, ", '["one", ', 1))
    browser.open(write_page(tmp_path / "report.html", run))
    text = browser.run("document.querySelector('#overview').textContent")
    assert "predictions cannot be read" in text and "times.jsonl cannot be read" in text
    browser.box('[data-panel="train/lr"]')


@pytest.mark.parametrize(
    "state", ["b=eval%252", "b=eval%252Faccuracy~0.1", "x=constructor", "t=dim", "heat=toString", "constructor=1&s=Infinity&run=-1&z=a~b"]
)
def test_a_link_that_was_cut_shows_what_it_can(browser: Browser, sweep: Path, state: str) -> None:
    browser.open(sweep, fragment=f"#{state}&q=seed%3D1")
    assert browser.run("document.querySelectorAll('table.runs tbody tr:not(.dim)').length") == 3
    browser.box('[data-panel="train/lr"]')


VALUES = [{"lr": 10.0**-n, "model": "mlp" if n % 2 else "convnet", "seed": 0} for n in range(6)]


@pytest.mark.parametrize(("version", "runs"), [("2.10.1", 6), ("3.5.0", 6), ("4.5.0", 3)])
def test_few_runs_and_an_old_optuna_say_no_importance(monkeypatch: pytest.MonkeyPatch, version: str, runs: int) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert module.importance_of(VALUES[:runs], [1.0] * runs, goal="max") == {}


def test_the_importance_of_keys_comes_from_optuna(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the interface of Optuna 3.6, which cannot be installed together with Hydra's sweeper."""
    trials: list[dict[str, Any]] = []
    study = SimpleNamespace(add_trial=trials.append)
    float_distribution = type("Float", (), {"__init__": lambda self, low, high, log: None})
    optuna = SimpleNamespace(
        logging=SimpleNamespace(set_verbosity=lambda level: None, ERROR=40),
        create_study=lambda direction: {"maximize": study}[direction],
        distributions=SimpleNamespace(FloatDistribution=float_distribution, CategoricalDistribution=tuple),
        trial=SimpleNamespace(create_trial=lambda **trial: trial),
        importance=SimpleNamespace(
            get_param_importances=lambda study, evaluator: {"model": 0.25, "lr": 0.75}, PedAnovaImportanceEvaluator=lambda: None
        ),
    )
    monkeypatch.setattr(metadata, "version", lambda name: "4.5.0")
    monkeypatch.setattr(module, "import_module", {"optuna": optuna}.__getitem__)
    found = module.importance_of(VALUES, [0.1, 0.2, 0.3, 0.4, 0.5, None], goal="max")
    assert found == {"model": 0.25, "lr": 0.75}
    assert [trial["params"]["model"] for trial in trials] == ["convnet", "mlp", "convnet", "mlp", "convnet"]
