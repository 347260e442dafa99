"""Draws the pictures of docs/report.md: pages of a healthy, a diverged and a broken run, as a laptop shows them.

python -m tests.unit.report.pictures docs/images
"""

import os
import sys
import tempfile
from pathlib import Path

from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.analysis.page.page_data import page_data
from msprobe_megatron.report.html.page import page
from tests.unit.report.browser import load, open_browser, settle, tab
from tests.unit.report.runs import make_run

_STEPS = 20


def main(folder: str) -> None:
    """Write report_*.png into `folder`."""
    out = Path(folder).resolve()
    with tempfile.TemporaryDirectory() as name:
        # Runs are named by the path they are opened with; pages should not show a temporary one.
        os.chdir(name)
        make_run(Path("one_card"), "single", steps=_STEPS)
        make_run(Path("tp2_pp2"), "tp2_pp2", steps=_STEPS)
        make_run(Path("tp2_pp2_nan"), "tp2_pp2", steps=_STEPS, fault="overflow", since=12)
        make_run(Path("tp2_pp2_new"), "tp2_pp2", steps=_STEPS, fault="attention_scale", since=6)
        golden = open_run("one_card")
        pages = {
            "healthy": page_data(open_run("tp2_pp2"), golden),
            "nan": page_data(open_run("tp2_pp2_nan")),
            "diverged": page_data(open_run("tp2_pp2_new"), golden),
        }
        heads = {kind: data["verdict"]["headline"] for kind, data in pages.items()}
        expected = {"healthy": "Agrees with the golden run"}
        expected["nan"] = "Non-finite (Inf) since step 12 in decoder.layers.2.pre_mlp_layernorm"
        expected["diverged"] = "Diverged at step 6 in decoder.layers.1.self_attention.core_attention"
        if heads != expected:
            sys.exit(f"these runs are not what the pictures are to show: {heads}")
        browser = open_browser(Path(name, "profile"))
        for kind, data in pages.items():
            file = Path(name, f"{kind}.html")
            file.write_text(page(data), encoding="utf-8")
            load(browser, file, 1000)
            settle(browser)
            browser.save_screenshot(str(out / f"report_{kind}.png"))
        tab(browser, "where")
        browser.find_element("id", "theme").click()
        settle(browser)
        browser.save_screenshot(str(out / "report_where_dark.png"))
        browser.quit()


if __name__ == "__main__":
    main(*sys.argv[1:])
