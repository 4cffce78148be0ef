"""The command line."""

from dew.cli.main import main as main
