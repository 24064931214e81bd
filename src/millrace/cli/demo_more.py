"""All demos: importing this makes `millrace demo` and the commands below it one group."""

from millrace.cli import demo_consolidate, demo_tube
from millrace.cli.demo import app

__all__ = ["app", "demo_consolidate", "demo_tube"]
