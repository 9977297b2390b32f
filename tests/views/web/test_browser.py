"""The page in a browser: every view by clicks, at three widths, light and dark, by keyboard; strangers' text runs nothing.

Slow: `make test-slow`. Skipped where Chromium or its driver is missing.
"""

import re
import shutil
from urllib.parse import urlsplit

import pytest

from shoal.views.web.group_pages import GROUP_VIEWS
from shoal.views.web.run_pages import VIEWS as RUN_VIEWS
from shoal.views.web.served_runs import ServedRuns
from tests.views.web.browser import TOKEN, checked, go, needs_browser, opened, served
from tests.views.web.hostile_run import hostile_addresses

VIEWS = ("Overview", "Figures", "Held-out", "Groups", "Nodes", "Validators", "Refusals", "Versions", "Log", "Alarms")
INNER = (
    ("Figures", "a[rel=next]"), ("Figures", "figcaption a", "tbody th a"),
    ("Groups", "tbody th a", "article h2 a"), ("Groups", "tbody th a", "a[href*='/versions/']"),
    ("Groups", "tbody a[href*=task]"), ("Nodes", "tbody th a"), ("Refusals", "tbody a[href*=check]"),
    ("Refusals", "#rows tbody a[href*='/groups/']"), ("Versions", "tbody a[href*='/steps/']"), ("Log", "a[rel=next]"),
    ("Log", ".timeline a.seq", "a[rel=prev]"), ("Compare", "tbody th a"),
)  # fmt: skip
"""A view, and what is clicked in it, one after the other."""

PATHS = [f"/1{path}" for path in (*RUN_VIEWS, *GROUP_VIEWS)]
"""All that the page answers with a view of a run."""

VISITS = 4
"""Of new viewers, of which the quickest counts: other tests share the machine, and only ever add."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), needs_browser]  # more than it takes on a busy machine


def pattern(path):
    """What matches the addresses of a route."""
    return re.sub(r"\{\w+(:int)?\}", "[^/]+", path)


@pytest.fixture(scope="module")
def url(testbed, tmp_path_factory):
    served_runs = ServedRuns(tmp_path_factory.mktemp("browser") / "index.sqlite", [str(testbed.folder.root)])
    while served_runs.step():
        pass
    with served(served_runs) as url:
        yield url
    served_runs.close()


@pytest.fixture(scope="module")
def url_of_two(testbed, tmp_path_factory):
    """A page of two runs."""
    folder = tmp_path_factory.mktemp("two")
    other = shutil.copytree(testbed.folder.root, folder / "other")
    served_runs = ServedRuns(folder / "index.sqlite", [str(testbed.folder.root), str(other)])
    while served_runs.step():
        pass
    with served(served_runs) as url:
        yield url
    served_runs.close()


@pytest.mark.parametrize(("width", "mode"), [(400, "light"), (900, "dark"), (1600, "light")])
def test_every_view_is_reached_by_clicks_fits_its_width_and_has_no_serious_fault(
    url_of_two, browser, complaints, width, mode
):
    page, seen = opened(browser, complaints, width, mode), set()
    page.on("framenavigated", lambda frame: seen.add(urlsplit(frame.url).path))
    page.goto(f"{url_of_two}/?token={TOKEN}")
    checked(page, width)
    page.locator("tbody th a").first.click()
    for view in VIEWS:
        go(page, view)
        checked(page, width)
    for view, *links in INNER:
        go(page, view)
        for link in links:
            page.locator(link).first.click()
            page.wait_for_load_state("networkidle")
            checked(page, width)
    missed = [path for path in ("/compare", *PATHS) if not any(re.fullmatch(pattern(path), one) for one in seen)]
    assert missed == [] and complaints == []


def test_from_the_overview_a_cheater_is_found_with_the_tokens_that_its_seed_did_not_choose(url, browser, complaints):
    page = opened(browser, complaints)
    page.goto(f"{url}/?token={TOKEN}")
    page.locator("#refused-h ~ .scroll tbody a").first.click()
    assert "sampling" in page.locator("#rows tbody tr").first.inner_text()
    page.locator("#rows tbody a[href*='/groups/']").first.click()
    assert page.get_by_role("heading", level=1).locator(".refused").count() == 1
    page.get_by_label("replay gap").check()
    page.get_by_role("button", name="Show").click()
    assert page.locator("article .t5").count() > 0, page.locator(".note").all_inner_texts()
    assert "gap" in page.locator("article .t5").first.get_attribute("title")
    assert "shoal audit" in page.locator(".command").inner_text()
    assert complaints == []


def test_no_label_of_the_overview_breaks_within_a_word(url, browser, complaints):
    page = opened(browser, complaints)
    page.goto(url)
    for width in (320, 400, 600, 700, 900, 1000, 1100, 1600):
        page.set_viewport_size({"width": width, "height": 900})
        words = page.evaluate("""() => {
            const lines = [], range = document.createRange();
            const words = document.createTreeWalker(document.querySelector(".cards"), NodeFilter.SHOW_TEXT);
            for (let text; (text = words.nextNode());) {
                if (!text.parentElement.closest("dt")) continue;
                for (const word of text.data.matchAll(/\\S+/g)) {
                    range.setStart(text, word.index);
                    range.setEnd(text, word.index + word[0].length);
                    lines.push([word[0], range.getClientRects().length]);
                }
            }
            return lines;
        }""")
        assert ["Reward", 1] in words and [word for word, lines in words if lines > 1] == [], width


def test_without_a_script_a_chart_is_told_in_words(url, browser, complaints):
    page = opened(browser, complaints, script=False)
    page.goto(url)
    assert re.search(
        r"points from step 0 to 1: first .* highest", page.locator("figure.chart .plot").first.inner_text()
    )


def test_the_page_works_by_keyboard(url, browser, complaints):
    page = opened(browser, complaints)
    page.goto(url)
    page.locator("figure.chart canvas").first.wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.goto(f"{url}/1/groups")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    assert page.locator("tr.current").count() == 1
    page.keyboard.press("Enter")
    page.wait_for_url("**/groups/*")
    page.goto(f"{url}/1/log")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.name") == "q"
    page.keyboard.type("forged OR ; --")
    page.keyboard.press("Enter")
    page.wait_for_url("**q=forged**")
    page.goto(f"{url}/1/log")
    page.keyboard.press("p")
    assert page.locator("#polled").inner_text() == "Paused"
    assert complaints == []


def test_a_figure_that_was_smoothed_has_an_address(url, browser, complaints):
    page = opened(browser, complaints)
    page.goto(f"{url}/1/figure?name=reward_mean")
    page.locator("[data-smooth]").fill("0.5")
    page.wait_for_url("**smooth=0.5")
    page.reload()
    assert page.locator("[data-smooth]").input_value() == "0.5"


@pytest.mark.parametrize(
    ("highest", "labels"),
    [
        (0.01, {"0", "0.002", "0.01"}), (0.02, {"0", "0.0025", "0.02"}), (2e-4, {"0", "2.5e-5", "2e-4"}),
        (2e-6, {"0", "5e-7", "1.5e-6", "2e-6"}), (400_000, {"0", "100,000", "200,000", "300,000", "400,000"}),
        (0.0, {"0", "0.2", "0.4", "0.6", "0.8", "1"}),
    ],
)  # fmt: skip
def test_the_labels_of_an_axis_have_the_digits_that_its_steps_need(url, browser, complaints, highest, labels):
    page = opened(browser, complaints)
    page.add_init_script(
        "window.drawn = []; const fill = CanvasRenderingContext2D.prototype.fillText;"
        "CanvasRenderingContext2D.prototype.fillText ="
        " function (text, ...at) { drawn.push(text); fill.call(this, text, ...at); };"
    )
    lines = [{"label": "all", "values": [0.0, highest / 2, highest], "edge": False}]
    told = {"x": [1001, 1002, 1003], "unit": "", "x_label": "step", "lines": lines}
    page.route("**/chart.json*", lambda route: route.fulfill(json=told))
    page.goto(f"{url}/1/figure?name=reward_mean")
    page.locator("figure.chart canvas").wait_for()
    steps = {text for text in page.evaluate("drawn") if text.startswith("1,00")}
    assert steps == {"1,001", "1,002", "1,003"}, "a step is whole"
    seen = [text for text in page.evaluate("drawn") if not text.startswith("1,00")]
    assert labels <= set(seen) and len(seen) == len(set(seen)), seen
    assert complaints == []


def test_a_point_of_a_chart_leads_to_its_step_and_a_drag_zooms(url, browser, complaints):
    page = opened(browser, complaints)
    page.goto(f"{url}/1/figure?name=reward_mean")
    chart = page.locator("figure.chart .u-over")
    chart.wait_for()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + 20, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 20, box["y"] + 20, steps=5)
    page.mouse.up()
    assert page.url.endswith("figure?name=reward_mean")
    chart.click(position={"x": box["width"] - 2, "y": 20})
    page.wait_for_url("**/1/steps/1")
    assert complaints == []


def test_the_first_paint_comes_within_a_second_and_300_kilobytes(url, browser, complaints):
    paints = []
    for _ in range(VISITS):
        page = opened(browser, complaints)
        page.goto(url)
        page.wait_for_load_state("networkidle")
        paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
        kinds = "['navigation', 'resource'].flatMap((kind) => performance.getEntriesByType(kind))"
        transferred = page.evaluate(f"{kinds}.reduce((sum, one) => sum + one.transferSize, 0)")
        page.context.close()
    print(f"first paint {min(paints):.0f} ms, {transferred / 1000:.1f} kB")
    assert min(paints) <= 1000 and 10_000 < transferred <= 300_000


def test_thirty_hostile_texts_run_nothing_and_add_no_element(hostile, browser, complaints):
    with served(hostile) as url:
        page = opened(browser, complaints, 400)
        page.goto(f"{url}/?token={TOKEN}")
        for view in hostile_addresses(hostile):
            page.goto(url + view)
            page.wait_for_load_state("networkidle")
            found = page.evaluate(
                "[...document.querySelectorAll('iframe, img, base, object, embed, style, meta[http-equiv], "
                'script:not([src^="/static/"]), a[href^="javascript"]\')].map((one) => one.outerHTML)'
            )
            handlers = page.evaluate(
                "[...document.querySelectorAll('*')].flatMap((one) => [...one.attributes].map((a) => a.name))"
                ".filter((name) => name.startsWith('on'))"
            )
            assert (found, handlers) == ([], []), view
            assert page.evaluate("document.documentElement.scrollWidth") <= 400, view
        page.goto(f"{url}/1/nodes")
        assert "<svg onload=alert(1" in page.locator("#rows").inner_text()
        page.goto(f"{url}/1/groups/{hostile.look().rows('SELECT id FROM groups WHERE public = 1')[0]['id']}?parts=1")
        assert "<img src=x onerror=alert(1)>" in page.locator("dl.parts").first.inner_text()
    assert complaints == []
