"""What parts of a long benchmark measured, one file each, so that it can be made in pieces and joined.

Called by `benchmarks/real_models.py` and `benchmarks/adapters.py` with the folder of `--keep`. A file holds what was asked
and what was found, and counts only while the same is asked. It does not know what was measured.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Kept:
    """Results by name. Without a folder, nothing is kept."""

    folder: Path | None = None

    def result(self, name: str, asked: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was found when the same was asked under this name, or what `make` finds now."""
        if self.folder is None:
            return make()
        path = self.folder / (re.sub(r"[^a-z0-9.]+", "-", name.lower()) + ".json")
        asked = json.loads(json.dumps(asked))  # tuples are lists in a file
        if path.exists():
            kept: dict[str, Any] = json.loads(path.read_text())
            if kept.get("asked") == asked:
                print(f"{name}: from {path.name}", flush=True)
                found: dict[str, Any] = kept["found"]
                return found
        found = make()
        self.folder.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".new").write_text(json.dumps({"asked": asked, "found": found}))
        path.with_suffix(".new").replace(path)  # a piece that is stopped leaves no half file
        return found
