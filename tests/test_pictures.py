"""The pictures of the docs: each is shown by a page, small, and made by a command in the tree."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PICTURES = sorted((ROOT / "docs" / "pictures").iterdir())
MOST_BYTES = 200_000
CLAIMS = (
    "clip_higher lengths lengths_longer staleness credit values distillation offline_filter dpo dpo_slower reward_model"
    " turns"
)
"""Pictures of claims whose runs are no longer made: their code is in the history."""


def of_the_page() -> set[str]:
    """The names that deploy/docs/shots.py writes, read without the browser that it needs."""
    parsed = ast.parse((ROOT / "deploy" / "docs" / "shots.py").read_text())
    [shots] = [
        one.value for one in parsed.body if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "SHOTS"
    ]
    return set(ast.literal_eval(shots))


def by_name() -> set[str]:
    """The files that commands of the docs write."""
    text = "\n".join(page.read_text() for page in DOCS)
    return {Path(file).name for file in re.findall(r"--(?:out|picture) (\S+\.svg)", text)}


def by_scripts() -> set[str]:
    """The files that the scripts of deploy/docs say that they write."""
    text = "\n".join(script.read_text() for script in (ROOT / "deploy" / "docs").glob("*.py"))
    return set(re.findall(r"docs/pictures/([\w-]+\.(?:png|svg))", text))


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_each_picture_is_shown_is_small_and_is_made_by_a_command(picture: Path) -> None:
    assert picture.stat().st_size <= MOST_BYTES
    assert any(f"pictures/{picture.name})" in page.read_text() for page in DOCS), "no page shows it"
    made = (
        {f"{name}.png" for name in of_the_page()}
        | by_scripts()
        | by_name()
        | {f"{name}.svg" for name in CLAIMS.split()}
    )
    assert picture.name in made, "no command makes it"
