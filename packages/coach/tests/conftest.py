import datetime as dt
import sys
from pathlib import Path

import pytest

from fitnesscoach.providers import sample

sys.path.insert(0, str(Path(__file__).parent))  # fake_openai.py

TODAY = dt.date(2026, 5, 13)


@pytest.fixture(scope="session")
def data():
    return sample.load(TODAY)
