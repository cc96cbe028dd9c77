"""Fixtures of the parity tests: models of ``families.py`` and the directories that transformers saves them to."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests import families.py by name


@pytest.fixture(scope="module", autouse=True)
def exact(exact_module):
    """Nothing is rounded: what is compared with computes in float32."""


@pytest.fixture(scope="session")
def saved_family(tmp_path_factory):
    """``saved_family(family, **changes) -> (model, directory)``, made once a session for equal arguments."""
    import families

    made = {}

    def get(family: str, **changes):
        key = (family, repr(sorted(changes.items())))
        if key not in made:
            model = families.build(family, **changes)
            made[key] = model, families.save(model, tmp_path_factory.mktemp(family) / "hf")
        return made[key]

    return get
