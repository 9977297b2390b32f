"""What tests of the sandbox need on this machine, and how they report what is missing."""

import shutil
import sys

import pytest

from shoal.sandbox.bubblewrap import INSTALL

MISSING = "" if sys.platform == "linux" and shutil.which("bwrap") else f"bubblewrap is not installed: {INSTALL}"

needs_bubblewrap = pytest.mark.skipif(bool(MISSING), reason=MISSING)
