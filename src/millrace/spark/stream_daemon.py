"""The parent of Spark's Python workers where changes are applied.

Invariant: as `daemon`, with the byte loops loaded as well: half a second, once, instead of in
every worker, and only for those who stream.
"""

from __future__ import annotations

import millrace.apply.task  # noqa: F401
from millrace.apply.warm_up import warm_up
from millrace.spark import daemon

if __name__ == "__main__":
    warm_up()
    daemon.run()
