"""The page in a real browser: it is built without an error, and tree, search, click, tabs, theme and maps work."""

import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.analysis.page.page_data import page_data
from msprobe_megatron.report.html.page import page
from tests.unit.report.browser import load, settle, tab

FIRST = "decoder.layers.2.pre_mlp_layernorm"
EVIL = "</script><script>alert(1)</script>"


def quiet(browser) -> bool:
    """Nothing was said on the console and nothing was asked of the network."""
    said = browser.get_log("browser")
    asked = browser.execute_script("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert said == [] and asked == []
    return True


def text(browser, selector: str) -> str:
    return browser.find_element("css selector", selector).text


def names(browser) -> list[str]:
    nodes = browser.find_elements("css selector", ".tree .node")
    return [node.get_attribute("data-name") for node in nodes]


def colors(browser, selector: str) -> set[tuple[int, ...]]:
    """Colours of a canvas, sampled."""
    script = """
        const canvas = document.querySelector(arguments[0]), found = new Set(), copy = document.createElement("canvas");
        [copy.width, copy.height] = [canvas.width, canvas.height];
        const reader = copy.getContext("2d", { willReadFrequently: true });
        reader.drawImage(canvas, 0, 0);
        const data = reader.getImageData(0, 0, canvas.width, canvas.height).data;
        for (let i = 0; i < data.length; i += 4 * 37) found.add([data[i], data[i + 1], data[i + 2]].join());
        return [...found];
    """
    return {tuple(map(int, entry.split(","))) for entry in browser.execute_script(script, selector)}


@pytest.mark.parametrize("name", ["healthy", "overflow", "torn", "diverged"])
def test_every_tab_opens_without_an_error(browser, pages, name):
    golden = "golden" if name == "diverged" else ""
    load(browser, pages.page(name, golden))
    for wanted in ("where", "when", "who", *(["versus"] if golden else []), "findings", "log", "setup", "overview"):
        tab(browser, wanted)
        shown = [
            s.get_attribute("id") for s in browser.find_elements("css selector", "section.tab") if s.is_displayed()
        ]
        assert shown == [f"tab-{wanted}"]
        assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    assert quiet(browser)


def test_the_verdict_comes_first_and_names_the_next_command(browser, pages):
    load(browser, pages.page("overflow"))
    assert text(browser, "h1") == f"Non-finite (Inf) since step 3 in {FIRST}"
    assert FIRST in text(browser, "#verdict")
    assert "msprobe-megatron diagnose" in text(browser, "#verdict .command")
    browser.find_element("css selector", "#verdict button.link").click()
    assert text(browser, "#tab-where .where-panes > .stack h2") == FIRST
    assert quiet(browser)


def test_tree_search_and_click(browser, pages):
    load(browser, pages.page("healthy"))
    tab(browser, "where")
    assert "decoder.layers.0" in names(browser) and "decoder.layers.3" in names(browser)
    assert "decoder.layers.3.mlp.linear_fc1" not in names(browser)
    search = browser.find_element("id", "search")
    search.send_keys("layers.3.mlp.linear_fc1")
    found = names(browser)
    assert "decoder.layers.3.mlp.linear_fc1" in found and "decoder.layers.0" not in found
    node = next(
        n
        for n in browser.find_elements("css selector", ".tree .node")
        if n.get_attribute("data-name") == "decoder.layers.3.mlp.linear_fc1"
    )
    node.click()
    assert text(browser, "#tab-where .where-panes > .stack h2") == "decoder.layers.3.mlp.linear_fc1"
    # Two ranks of the second stage hold a half each; figures are those of the run.
    rows = browser.find_elements("css selector", "#shards tbody tr")
    assert [row.find_elements("css selector", "td")[0].text for row in rows] == ["2", "3"]
    assert "megatron/core/transformer/mlp.py" in text(browser, ".frames")
    search.clear()
    search.send_keys("no such module")
    assert names(browser) == []
    assert quiet(browser)


def test_click_shows_the_norm_that_the_run_holds(browser, pages):
    load(browser, pages.page("healthy"))
    tab(browser, "where")
    browser.find_element("id", "search").send_keys("final_layernorm.weight")
    browser.find_elements("css selector", ".tree .node")[-1].click()
    tables = [pq.read_table(f) for f in sorted(pages.run("healthy").glob("step_000004/rank_00002/records.parquet"))]
    rows = [row for row in tables[0].to_pylist() if row["name"] == "decoder.final_layernorm.weight"]
    expected = next(row for row in rows if row["kind"] == "parameter")["sumsq"] ** 0.5
    shown = browser.find_element("css selector", "#tensors tr[data-key^=parameter] td.n").text
    assert float(shown) == pytest.approx(expected, rel=1e-4)


def test_colour_by_a_statistic(browser, pages):
    load(browser, pages.page("healthy"))
    tab(browser, "where")
    browser.execute_script("""
        const box = document.querySelector('#tab-where select[aria-label=colour]');
        box.value = "norm"; box.dispatchEvent(new Event("change"));
    """)
    script = "return [...document.querySelectorAll('.tree .swatch')].map((s) => s.style.background)"
    assert len(set(browser.execute_script(script))) > 3
    assert quiet(browser)


def test_heat_maps_are_drawn_and_show_what_is_not_finite(browser, pages):
    load(browser, pages.page("healthy"))
    settle(browser)
    bad = (192, 32, 58)
    healthy = colors(browser, "#tab-overview canvas")
    assert len(healthy) > 5 and bad not in healthy
    load(browser, pages.page("overflow"))
    settle(browser)
    assert bad in colors(browser, "#tab-overview canvas")
    tab(browser, "when")
    assert bad in colors(browser, "#tab-when .card:last-child canvas")
    assert browser.find_elements("css selector", "#trends svg path.line")
    assert quiet(browser)


def test_theme_changes_colours_of_page_and_canvas(browser, pages):
    load(browser, pages.page("healthy"))
    settle(browser)
    ground = "return getComputedStyle(document.body).backgroundColor"
    light, drawn = browser.execute_script(ground), colors(browser, "#tab-overview canvas")
    browser.find_element("id", "theme").click()
    settle(browser)
    assert browser.execute_script(ground) != light
    assert colors(browser, "#tab-overview canvas") != drawn
    browser.find_element("id", "theme").click()
    assert browser.execute_script(ground) == light
    assert quiet(browser)


def test_trend_of_a_name_that_is_typed(browser, pages):
    load(browser, pages.page("diverged", "golden"))
    tab(browser, "when")
    before = len(browser.find_elements("css selector", "#trends .chip"))
    browser.execute_script("""
        const box = document.getElementById("trend-name");
        box.value = "decoder.layers.0.mlp"; box.dispatchEvent(new Event("change"));
    """)
    assert len(browser.find_elements("css selector", "#trends .chip")) == before + 1
    # Beside a golden run every trend has two lines.
    assert len(browser.find_elements("css selector", "#trends path.line")) == 2 * (before + 1)
    assert quiet(browser)


def test_comparison_shows_the_way_to_the_first_divergence(browser, pages):
    load(browser, pages.page("diverged", "golden"))
    assert text(browser, "h1").startswith("Diverged at step 2 in decoder.layers.1.self_attention.core_attention")
    tab(browser, "versus")
    stops = browser.find_elements("css selector", "#flow .stop")
    states = [stop.find_element("css selector", ".badge").text for stop in stops]
    at = states.index("first divergence")
    assert set(states[:at]) == {"agrees"} and at > 3
    assert "tensor_model_parallel_size" in text(browser, "#setup-differences")
    stops[at].click()
    assert "decoder.layers.1.self_attention.core_attention" in text(browser, "#tab-where .where-panes > .stack h2")
    assert quiet(browser)


def test_replicas_that_disagree_are_shown_with_their_ranks(browser, pages):
    load(browser, pages.page("torn"))
    assert text(browser, "h1") == "Replicas disagree since step 0: decoder.layers.1.input_layernorm.weight"
    tab(browser, "who")
    assert len(browser.find_elements("css selector", ".rank.odd")) == 2
    first = text(browser, "#replicas tbody tr")
    assert "decoder.layers.1.input_layernorm.weight" in first and "ranks 0: norm 8" in first
    assert quiet(browser)


ODD_NAMES = (
    EVIL,
    "<img src=x onerror=alert(2)>",
    """quotes "double" 'single' `back`""",
    "turned \u202eround",
    "nul\x00inside",
    "long." + "n" * 4096,
    "__proto__",
    "constructor",
    "名前.模块",
)


def test_odd_names_are_only_names(browser, pages, tmp_path):
    run = tmp_path / "evil"
    shutil.copytree(pages.run("torn"), run)
    modules = ("input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp")
    old = {f"decoder.layers.{n // 4}.{modules[n % 4]}": name for n, name in enumerate(ODD_NAMES)}
    for file in run.glob("step_*/rank_*/records.parquet"):
        table = pq.read_table(file)
        changed = [old.get(name, name) for name in table["name"].to_pylist()]
        index = table.schema.get_field_index("name")
        column = pa.array(changed).dictionary_encode()
        pq.write_table(table.set_column(index, table.schema.field("name"), column), file)
    for file in run.glob("step_*/rank_*/sites.json"):
        content = json.loads(file.read_text())
        for module in content["modules"]:
            # This one is known by its rows alone.
            module["name"] = old.get(module["name"], module["name"]).replace("constructor", "other")
            module["stack"] = [*module["stack"], "<b>bold</b>\u2028 </script>"]
        file.write_text(json.dumps(content))
    path = tmp_path / "evil.html"
    path.write_text(page(page_data(open_run(run))), encoding="utf-8")
    load(browser, path)
    tab(browser, "where")
    for name in ODD_NAMES:
        shown = browser.execute_script("showTensor(keyOf(BY_NAME.get(arguments[0])[0])); return where.name;", name)
        assert shown == name
        title = browser.find_element("css selector", "#tab-where .where-panes > .stack h2")
        assert title.get_property("textContent") == name
        assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    assert {EVIL, "<img src=x onerror=alert(2)>"} <= set(names(browser))
    for other in ("overview", "when", "who", "log"):
        tab(browser, other)
        assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    assert browser.execute_script("return document.scripts.length") == 2
    assert browser.execute_script("return document.images.length") == 0
    assert quiet(browser)


def test_events_stand_on_a_time_line(browser, pages, tmp_path):
    run = tmp_path / "eventful"
    shutil.copytree(pages.run("torn"), run)
    lines = [
        {"event": "alert", "rule": "spike", "name": "lm loss", "rank": 0, "step": 1, "text": "<i>loss rose</i>"},
        {"event": "alert", "rule": "spike", "name": "z loss", "rank": 1, "step": 1, "text": "loss rose"},
        {"event": "fault", "rank": 1, "step": 4, "text": "disk full"},
        {"event": "note", "rank": 0, "text": "no step"},
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = tmp_path / "eventful.html"
    path.write_text(page(page_data(open_run(run))), encoding="utf-8")
    load(browser, path)
    tab(browser, "findings")
    dots = browser.find_elements("css selector", "svg[aria-label='alerts by step'] circle")
    places = [float(dot.get_attribute("cx")) for dot in dots]
    assert len(places) == 3 and places[0] == places[1] < places[2]
    assert "<i>loss rose</i>" in text(browser, "#alerts")
    tab(browser, "log")
    assert "<i>loss rose</i>" in text(browser, "#tab-log") and "no step" in text(browser, "#tab-log")
    assert quiet(browser)


def test_a_stage_is_marked_only_for_what_its_own_ranks_hold(browser, pages):
    load(browser, pages.page("overflow"))
    tab(browser, "where")
    marks = browser.execute_script("""
        const nodes = [...document.querySelectorAll('.tree .node[data-name=model]')];
        return nodes.map((node) => node.innerText.includes("non-finite"));
    """)
    # At the first bad step, in the forward direction, only the second stage's model has seen it.
    assert marks == [False, True]


def test_paper_shows_every_tab(browser, pages):
    load(browser, pages.page("healthy"))
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        shown = [s.is_displayed() for s in browser.find_elements("css selector", "section.tab")]
        assert len(shown) == 7 and all(shown)
        assert not browser.find_element("css selector", "nav").is_displayed()
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "screen"})


def test_paper_is_light_whatever_the_screen_is(browser, pages):
    load(browser, pages.page("healthy"))
    browser.find_element("id", "theme").click()
    theme = "return document.documentElement.getAttribute('data-theme')"
    try:
        assert browser.execute_script(theme) == "dark"
        browser.execute_script("window.dispatchEvent(new Event('beforeprint'))")
        assert browser.execute_script(theme) == "light"
        browser.execute_script("window.dispatchEvent(new Event('afterprint'))")
        assert browser.execute_script(theme) == "dark"
        shown = [s for s in browser.find_elements("css selector", "section.tab") if s.is_displayed()]
        assert [s.get_attribute("id") for s in shown] == ["tab-overview"]
    finally:
        browser.find_element("id", "theme").click()


@pytest.mark.parametrize("width", [1280, 1440])
def test_nothing_is_wider_than_a_laptop(browser, pages, width):
    load(browser, pages.page("diverged", "golden"))
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    for wanted in ("overview", "where", "when", "who", "versus", "findings", "log", "setup"):
        tab(browser, wanted)
        assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth"), wanted
    assert quiet(browser)


@pytest.mark.parametrize(("name", "golden"), [("healthy", ""), ("overflow", ""), ("diverged", "golden")])
def test_pictures_are_made(browser, pages, tmp_path, name, golden):
    """Kept in $MSPROBE_PICTURES if that is set."""
    load(browser, pages.page(name, golden))
    folder = Path(os.environ.get("MSPROBE_PICTURES") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    settle(browser)
    file = folder / f"report_{name}.png"
    assert browser.save_screenshot(str(file))
    assert 20_000 < file.stat().st_size < 300_000
