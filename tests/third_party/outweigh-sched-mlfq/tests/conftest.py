"""Before the suites are imported: failures show their values, and small tensors take one thread."""

from __future__ import annotations

import os

import pytest

pytest.register_assert_rewrite("core.testing")
os.environ.setdefault("OMP_NUM_THREADS", "1")
