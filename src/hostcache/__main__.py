"""`python -m hostcache` is the command `hostcache`."""

import sys

from hostcache.cli import main

sys.exit(main())
