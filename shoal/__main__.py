"""`python -m shoal`, the same as `shoal`."""

import sys

from shoal.cli.main import main

sys.exit(main())
