"""Before triton and the suites are imported: the interpreter stands in where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch

pytest.register_assert_rewrite("core.testing")
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
