"""``pwjax generate --profile``: a trace that names what the engine does."""

import gzip

import pytest
from click.testing import CliRunner

from pwjax.cli import cli


@pytest.mark.slow
def test_a_trace_names_steps_and_boundaries(tiny_artifact, tmp_path):
    options = ["--model", str(tiny_artifact), "--batch", "4", "--context", "128", "--max-tokens", "4", "--quiet"]
    result = CliRunner().invoke(cli, ["generate", "The quick", *options, "--profile", str(tmp_path / "trace")])
    assert result.exit_code == 0, result.output
    [trace] = (tmp_path / "trace").rglob("*.trace.json.gz")
    events = gzip.open(trace, "rt").read()
    assert all(f'"name":"{name}"' in events for name in ("boundary", "prefill 32", "decode 4"))
    # The scopes of the programs are in the names of their operations.
    [profile] = (tmp_path / "trace").rglob("*.xplane.pb")
    names = profile.read_bytes()
    assert all(scope in names for scope in (b"decode/", b"attention/", b"router/", b"experts/"))
