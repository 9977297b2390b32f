"""The docs as a site: every page can be found, every link leads somewhere, and nothing comes from another server."""

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from deploy.docs.build import generator, page_of, prepared
from shoal.envs.load import load_env
from tests.test_docs import fences, named_files

ROOT = Path(__file__).parent.parent
COMING_FROM = ROOT / "docs" / "how-to" / "coming-from.md"
LOADED = re.compile(r'<(?:script|img|iframe|source)\b[^>]*\bsrc="([^"]+)"|<link\b[^>]*\bhref="([^"]+)"')
LINK = re.compile(r'<a\b[^>]*\bhref="([^"]+)"')


def pages_of(nav: Any) -> Iterator[str]:
    """The pages of a navigation, however deep."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(part)


def test_every_page_is_in_the_navigation_once() -> None:
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    docs = ROOT / "docs"
    pages = [page.relative_to(docs).as_posix() for page in docs.rglob("*.md")]
    pages += [page.relative_to(docs).with_suffix(".md").as_posix() for page in docs.rglob("*.ipynb")]
    assert sorted(pages_of(nav)) == sorted(pages)


def test_keys_beside_those_of_others_are_of_the_run_file() -> None:
    rows = [line.split(" | ") for line in COMING_FROM.read_text().splitlines() if line.startswith("| ")]
    shown = {
        span for row in rows for span in re.findall(r"`([^`]+)`", row[1]) if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", span)
    }
    text = (ROOT / "docs" / "reference" / "run-file.md").read_text()
    assert len(shown) > 40
    assert [key for key in shown if f"| `{key}` |" not in text] == []


def test_a_reward_function_of_trl_scores_in_the_environment_that_wraps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the data and the hash that the page shows."""
    (tmp_path / "wrapped_env.py").write_text(named_files(COMING_FROM)["wrapped_env.py"])
    blocks = {fence.info: fence.text for fence in fences(COMING_FROM)}
    (tmp_path / "sums.jsonl").write_text(blocks["json"])
    monkeypatch.chdir(tmp_path)
    [settings] = tomllib.loads(
        next(fence.text for fence in fences(COMING_FROM) if 'path = "sums.jsonl"' in fence.text)
    )["envs"]
    env = load_env(settings["name"], settings["args"])
    assert (env.num_tasks, env.num_heldout) == (1, 1)
    for heldout in (False, True):
        task = env.task(0, heldout)
        state, [opening] = env.reset(task)
        scores = [env.score(env.step(state, text).state) for text in (str(task["answer"]), "5")]
        assert ([opening], scores) == (task["prompt"], [1.0, 0.0])

    def by_keyword(prompts: Any, completions: Any, answer: Any, text: Any, **_: Any) -> list[float]:
        return [
            float((prompts, completions[0][0]["content"], answer, text) == ([task["prompt"]], "7", [7], ["a column"]))
        ]

    monkeypatch.setitem(type(env).score.__globals__, "right", by_keyword)
    state, _ = env.reset({**task, "answer": 7, "text": "a column"})
    assert env.score(env.step(state, "7").state) == 1.0


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the site is built from."""
    pytest.importorskip("zensical", reason="the site's generator is not installed: pip install '.[docs]'")
    return prepared(tmp_path_factory.mktemp("site"))


def build(project: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(generator(), cwd=project, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def site(project: Path) -> Path:
    done = build(project)
    assert done.returncode == 0, done.stdout + done.stderr
    return project / "site"


def test_the_site_has_every_page_and_no_dead_link(project: Path, site: Path) -> None:
    pages = {page.relative_to(project / "docs").with_suffix(".html") for page in (project / "docs").rglob("*.md")}
    indexed = [page.with_name("index.html") if page.name == "README.html" else page for page in pages]
    assert [page for page in indexed if not (site / page).is_file()] == []
    dead = []
    for page in site.rglob("*.html"):
        text = page.read_text()
        for found in [*LINK.findall(text), *(script or style for script, style in LOADED.findall(text))]:
            parts = urlsplit(found)
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if not parts.scheme and page.name != "404.html" and not target.exists():
                dead.append(f"{page.relative_to(site)}: {found}")
    assert dead == []


def test_pages_load_nothing_from_another_server(site: Path) -> None:
    texts = {page.relative_to(site).as_posix(): page.read_text() for page in site.rglob("*.html")}
    loaded = {name: [a or b for a, b in LOADED.findall(text)] for name, text in texts.items()}
    abroad = {name: [one for one in ones if "//" in one] for name, ones in loaded.items()}
    assert {name: ones for name, ones in abroad.items() if ones} == {}
    assert "console run" not in texts["tutorial.html"], "a code block was taken for text"


def test_notebooks_are_pages_that_others_link_to_and_that_offer_the_file(site: Path) -> None:
    page = (site / "notebooks" / "first_run.html").read_text()
    assert "train_here" in page and 'href="first_run.ipynb" download' in page
    assert (site / "notebooks" / "first_run.ipynb").is_file()
    assert "notebooks/first_run.html" in (site / "index.html").read_text()


def test_a_notebook_becomes_texts_and_blocks_of_code() -> None:
    cells = [("markdown", "# A\n\nWhy."), ("code", "x = 1\nx"), ("markdown", "Then.")]
    notebook = {"cells": [{"cell_type": kind, "source": text.splitlines(keepends=True)} for kind, text in cells]}
    page = page_of(notebook, "a.ipynb")
    assert page.startswith("# A\n\n!!! note") and "`jupyter lab a.ipynb`" in page
    assert "\nWhy.\n\n```python\nx = 1\nx\n```\n\nThen.\n" in page


def test_the_index_of_the_search_has_the_words_of_a_page(site: Path) -> None:
    whole = json.loads((site / "search.json").read_text())
    assert (site / "search.js").read_text().count("quarantine") > 0, "pages opened as files read the index as a script"
    found = {item["location"].partition("#")[0] for item in whole["items"] if "quarantine" in item["text"].lower()}
    assert "how-to/watch-a-run.html" in found
    assert {item["location"].partition("#")[0] for item in whole["items"]} >= {"notebooks/first_run.html", "faq.html"}


@pytest.mark.slow
def test_typing_a_word_finds_its_page_in_a_browser_without_a_server(site: Path) -> None:
    needs = "needs a browser: make browser"
    sync_api = pytest.importorskip("playwright.sync_api", reason=needs)
    chromium = shutil.which("chromium") or pytest.skip(needs)
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page, asked = browser.new_context(offline=True).new_page(), []
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / "index.html").as_uri())
        page.keyboard.press("/")
        page.keyboard.type("quarantine")
        page.locator("a[href*='watch-a-run.html']", has_text="alarm").last.wait_for()
        browser.close()
    assert [url for url in asked if not url.startswith(("file://", "about:"))] == []


def test_a_broken_link_fails_the_build(project: Path) -> None:
    page = project / "docs" / "glossary.md"
    before = page.read_text()
    page.write_text(before + "\n[nowhere](how-to/nowhere.md)\n")
    try:
        assert build(project).returncode != 0
    finally:
        page.write_text(before)
