"""`python -m dew`, the same program as the command `dew`."""

import sys

from dew.cli import main

sys.exit(main())
