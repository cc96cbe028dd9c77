"""``python -m pwjax`` is the ``pwjax`` command."""

import sys

from pwjax.cli import main

sys.exit(main())
