"""No span: every node runs as it is written in core/model.py, the oracle of every fusion."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from core.config import OfferConfig

if TYPE_CHECKING:
    import torch

    from core.facts import ModelFacts
    from core.seams import Span


class NoFusion:
    """The plain chain."""

    api: ClassVar[int] = 1
    lossless: ClassVar[bool] = True

    class Config(OfferConfig):
        """No options."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()

    def spans(self, facts: ModelFacts, device: torch.device) -> list[Span]:
        return []
