"""``python -m pwjax`` is the ``pwjax`` command."""

from pwjax.cli import run

run()
