"""Builds the docs as a site: `python deploy/docs/build.py` writes site/, as `make docs` does.

The generator reads Markdown alone, so notebooks become pages first: in a copy of docs/, never in the tree. Pages that
link to a notebook then link to its page, and the page offers the file. A link without a target, or a warning, ends it
with exit code 1.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TO_NOTEBOOK = re.compile(r"\]\((?P<path>[\w./-]+)\.ipynb\)")
OFFER = (
    '!!! note\n\n    This page is a notebook. <a href="{name}" download>Download it</a>, then open it with '
    "`jupyter lab {name}`. What its cells show appears when you run them.\n"
)


def main() -> int:
    """Build in a copy, then put the site into the tree."""
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(generator(), cwd=prepared(Path(scratch)), check=False)
        if done.returncode == 0:
            shutil.rmtree(ROOT / "site", ignore_errors=True)
            shutil.copytree(Path(scratch) / "site", ROOT / "site")
    return done.returncode


def generator() -> list[str]:
    """What is run in the copy."""
    return [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]


def prepared(place: Path) -> Path:
    """That folder with all that the site is made of."""
    shutil.copytree(ROOT / "docs", place / "docs")
    shutil.copytree(ROOT / "deploy" / "docs", place / "deploy" / "docs")
    shutil.copy(ROOT / "zensical.toml", place)
    for notebook in sorted((place / "docs").rglob("*.ipynb")):
        notebook.with_suffix(".md").write_text(page_of(json.loads(notebook.read_text()), notebook.name))
    for page in (place / "docs").rglob("*.md"):
        page.write_text(TO_NOTEBOOK.sub(r"](\g<path>.md)", page.read_text()))
    return place


def page_of(notebook: dict[str, Any], name: str) -> str:
    """A notebook as Markdown: texts as they are, code in blocks. The offer to download it stands below the heading."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```\n" if cell["cell_type"] == "code" else f"{text}\n")
    heading, _, rest = parts[0].partition("\n")
    return "\n".join([heading, "", OFFER.format(name=name), rest, *parts[1:]])


if __name__ == "__main__":
    sys.exit(main())
