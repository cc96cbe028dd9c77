"""``python -m pwjax`` is the ``pwjax`` command."""

import sys

from pwjax.cli import main

code = main()
# Python remembers a KeyboardInterrupt that passed through exec(), as imports use it, and would end by SIGINT instead of
# by the exit code although it was caught; any other exec() makes it forget.
exec("")
sys.exit(code)
