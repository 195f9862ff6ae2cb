"""This project's own gates, as anybody's tests run theirs: `pytest tests/bench/test_gates.py`."""

from __future__ import annotations

from pathlib import Path

import torch

from core.testing.gates import GateSuite


class TestGates(GateSuite):
    budgets = Path(__file__).with_name("budgets.toml")
    device = None if torch.cuda.is_available() else "cpu"
