"""The parent of Spark's Python workers, quick to start and with our task bodies loaded.

Invariant: does what pyspark's own daemon does; only where modules come from, and when
they are loaded, differs.

Spark puts zips of pyspark's sources before the installed package on the path. From those,
nothing is compiled beforehand, and each new worker reads their directories again: 0.8 s of
CPU for the daemon and 0.3 s for each worker. The installed package is the same version.
Task bodies are imported here, before the fork, and not by every worker. pyspark collects
garbage after each task; what is loaded here is frozen, so that it is not looked through again
and again, which took 30 ms.

Spark starts this module by name (`spark.python.daemon.module`).
"""

from __future__ import annotations

import gc
import sys

_ZIPS = ("pyspark.zip", "-src.zip")
sys.path[:] = [path for path in sys.path if not path.endswith(_ZIPS)]
sys.path_importer_cache.clear()

from pyspark import daemon  # noqa: E402 (after the path is set)


def run() -> None:
    """Fork workers until Spark ends."""
    gc.collect()
    gc.freeze()
    daemon.manager()


if __name__ == "__main__":
    run()
