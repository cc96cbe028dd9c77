"""``pwjax version``: ours and those that results depend on."""

import json

import click

from pwjax.cli.options import json_option
from pwjax.environment import base_versions


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Print the version, and those of Python and the base packages."""
    found = base_versions()
    if as_json:
        click.echo(json.dumps(found))
        return
    rest = ", ".join(f"{name} {version}" for name, version in found.items() if name != "pwjax")
    click.echo(f"pwjax {found['pwjax']} ({rest})")
