"""Result files as markdown, for docs/benchmarks.md: python -m bench.table RESULT.json ..."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bench.report import render_markdown

if __name__ == "__main__":
    print("\n".join(render_markdown(json.loads(Path(name).read_text())) for name in sys.argv[1:]))
