"""`outweigh new SEAM NAME`: a third-party package that works, to begin from."""

from __future__ import annotations

import importlib
import sys

from core.testing.new import main

if __name__ == "__main__":
    sys.exit(importlib.import_module("core.run").guarded(main, sys.argv[1:]))
