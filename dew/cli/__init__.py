"""Command line of dew: `main`, and one module per command."""

from dew.cli.main import main

__all__ = ["main"]
