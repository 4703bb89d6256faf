"""Why parts of train-torchax exist: what torchax 0.0.13 does without them.

A test that fails here says that a release has mended something, and that the part may go.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "stock" / "faults.py"


@pytest.fixture(scope="module")
def found():
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_attention_of_a_token_that_sees_nothing_is_not_a_number(found):
    """See attention.py; and the gradient of the tokens beside it is none either."""
    assert found["row_that_sees_nothing"] == [True, False, True, False]


def test_torchax_stays_off_after_an_exception_in_disable_temporarily(found):
    """See functional.plain_torch."""
    assert found["switch_after_exception"] is False


def test_torchax_takes_itself_for_off_after_nested_use(found):
    """See functional.enabled."""
    assert found["switch_after_nested_use"] is False


def test_type_as_changes_the_tensor_itself_and_fails_beside_a_view(found):
    """See functional._type_as."""
    assert found["type_as"] == {"changed": "torch.bfloat16", "beside a view": False}


def test_dropout_in_a_program_never_changes_and_leaks(found):
    """See dropout.py."""
    assert found["dropout"] == {"always the same": True, "leaks": True}
