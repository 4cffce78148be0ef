"""Samples of long tables of tests that change from day to day."""

import os
import random
from collections.abc import Iterable
from datetime import date
from typing import TypeVar

T = TypeVar("T")

VARIABLE = "DEW_TEST_SEED"
"""Environment variable that repeats the samples of another day."""


def daily_seed() -> str:
    """Returns the seed of this run's samples: the variable's value, else the date.

    The variable is set from then on, so that the workers of one run, which inherit the
    environment, draw alike even at midnight.
    """
    return os.environ.setdefault(VARIABLE, date.today().isoformat())


def daily_random(table: str) -> random.Random:
    """Returns a generator for one table of tests, seeded by the day."""
    return random.Random(f"{daily_seed()} {table}")


def daily_sample(table: str, rows: Iterable[T], count: int) -> set[T]:
    """Draws `count` rows of a table of tests, the same on all of one day."""
    return set(daily_random(table).sample(sorted(rows, key=str), count))
