"""What several files of tests compare: work on a toy, and what plain PyTorch makes of it."""

import pytest
from parity_work import toy_work

from portlab_hf import plain_script
from portlab_hf.evidence import collect


@pytest.fixture(scope="session")
def work(tmp_path_factory):
    return toy_work(tmp_path_factory.mktemp("parity"), "gemma3, two kv heads")


@pytest.fixture(scope="session")
def plain(work):
    return collect(work, plain_script, "plain")
