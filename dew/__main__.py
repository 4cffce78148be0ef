"""`python -m dew` is `dew`."""

import sys

from dew.cli import main

sys.exit(main())
