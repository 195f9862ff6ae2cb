"""`outweigh check SEAM NAME`: the conformance suite of a seam against one offer.

The body is `core.testing.check`, because it needs pytest, which a run does not.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence

from core.errors import UserError


def main(argv: Sequence[str]) -> int:
    """As `core.testing.check.main`; UserError that names the extra `dev` if pytest is missing."""
    if importlib.util.find_spec("pytest") is None:
        raise UserError("the suites need pytest, which is missing: pip install 'outweigh[dev]'")
    from core.testing import check

    return check.main(argv)


if __name__ == "__main__":
    sys.exit(importlib.import_module("core.run").guarded(main, sys.argv[1:]))
