"""What the page has of other people's is what its table says: package, version, and every byte."""

import hashlib
import re

from tests.test_docs import ROOT

STATIC = ROOT / "shoal" / "views" / "web" / "static"
OURS = {"README.md", "page.css", "page.js"}
ROW = re.compile(
    r"^\| `(?P<name>[^`]+)` \| .* \| (?P<version>[\d.]+) \| .* \| `(?P<sha>[0-9a-f]{64})` \|$", re.MULTILINE
)


def test_every_asset_of_a_package_has_the_bytes_that_the_table_names():
    rows = {row["name"]: row["sha"] for row in ROW.finditer((STATIC / "README.md").read_text())}
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in STATIC.iterdir() if path.name not in OURS
    }
    assert rows == found


def test_the_version_in_the_table_is_the_one_that_the_script_states():
    versions = {row["version"] for row in ROW.finditer((STATIC / "README.md").read_text())}
    assert versions == set(re.findall(r"uPlot \(v([\d.]+)\)", (STATIC / "uplot.js").read_text()[:100]))
