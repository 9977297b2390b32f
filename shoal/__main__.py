"""`python -m shoal`, the same as `shoal`."""

import sys

from shoal.cli import main

sys.exit(main())
