"""Runs the tests on the CPU unless a GPU is asked for, and keeps compiled programs between runs."""

import os

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports JAX: a machine with a GPU must not hand it to every test.
if not os.environ.get("PWJAX_TEST_GPU"):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Compilation makes the first example slow, so no deadline; CI replays the same examples every time.
settings.register_profile(
    "pwjax", deadline=None, max_examples=40, derandomize=bool(os.environ.get("CI")), print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("pwjax")


def pytest_configure(config):
    cache = getattr(config, "cache", None)
    if cache is not None:
        # Inherited by the command lines that tests start.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache.mkdir("jax")))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")


def pytest_collection_modifyitems(items):
    if os.environ.get("PWJAX_TEST_GPU"):
        return
    skip = pytest.mark.skip(reason="needs a GPU: set PWJAX_TEST_GPU=1")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
