"""`outweigh check SEAM NAME`: the conformance suite of a seam against one offer."""

from __future__ import annotations

import importlib
import sys

from core.testing.check import main

if __name__ == "__main__":
    sys.exit(importlib.import_module("core.run").guarded(main, sys.argv[1:]))
