"""All demos: importing this makes `millrace demo` and the commands below it one group."""

from millrace.cli.demo import consolidate, tube
from millrace.cli.demo.shop import app

__all__ = ["app", "consolidate", "tube"]
