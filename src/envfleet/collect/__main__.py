"""``python -m envfleet.collect``: see `envfleet.collect.command`."""

import sys

from envfleet.collect.command import main

sys.exit(main())
