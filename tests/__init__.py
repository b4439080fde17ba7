"""Tests and benchmarks. In a bare checkout, where nothing is installed, importing this makes Outrider importable."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

if importlib.util.find_spec("outrider") is None:
    sys.path.insert(0, str(ROOT / "protos"))
    import outrider

    outrider.__path__.append(str(ROOT))
