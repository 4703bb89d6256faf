"""Tests on 8 virtual devices: a file runs them in a process of its own, since JAX counts its devices once."""

import os
import subprocess
import sys

import jax
import pytest

HERE = jax.device_count() >= 8

on_eight_devices = pytest.mark.skipif(not HERE, reason="run by a test of this file in a process with 8 virtual devices")


def run_on_eight_devices(file, *options):
    """What pytest prints of a test file with 8 devices; it must pass there. Skips if this is that process."""
    if HERE:
        pytest.skip("this is the process with 8 devices")
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        # Nearly all of the time is compilation, which is twice as quick so.
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", *options, file]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout
