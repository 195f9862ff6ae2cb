"""Codes of few bits that stand for evenly spaced values between the ends of a group.

A group of numbers with centre c and radius r (the furthest any of them is from c) has 2**bits
values, c - r to c + r; a number is named by the nearest, so it is off by half a step, 2r /
(2**bits - 1), at most. Centre and step are float16, two bytes each: the radius is taken from the
centre as it is stored, so a large constant costs nothing but the bits of float16 that it takes.
Numbers beyond 65,504 saturate, and no step is under 6e-8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

NUMBER_BYTES = 2  # of a centre, and of a step
_LARGEST = torch.finfo(torch.float16).max
_HALF_OF_LEAST = 2.0**-25  # of the numbers of float16: its tiny ones lie so far apart


def encode(x: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 of x, then centre and step float16, of the groups along `dim`, which stays as 1.

    bits: 8, or 4: codes are 0..15 then, one a byte.
    """
    wide = x.float().clamp(-_LARGEST, _LARGEST)
    smallest, largest = wide.amin(dim, keepdim=True), wide.amax(dim, keepdim=True)
    centre = ((smallest + largest) / 2).half()
    radius = (wide - centre.float()).abs().amax(dim, keepdim=True)
    num_steps = 2**bits - 1
    # Tiny steps are rounded up, so that the ends of the group stay within reach.
    step = (2 * radius / num_steps + (radius > 0) * _HALF_OF_LEAST).half()
    divisor = torch.where(step > 0, step.float(), 1.0)
    codes = ((wide - centre.float()) / divisor + num_steps / 2).round().clamp(0, num_steps)
    return codes.to(torch.uint8), centre, step


def decode(codes: Tensor, centre: Tensor, step: Tensor, bits: int) -> Tensor:
    """float32 values of codes, one a byte; centre and step broadcast."""
    return torch.addcmul(centre.float(), codes.float() - (2**bits - 1) / 2, step.float())


def pack(codes: Tensor, bits: int) -> Tensor:
    """[..., D] codes, one a byte, to [..., D * bits / 8] bytes: code i beside code i + D/2."""
    if bits == 8:
        return codes
    low, high = codes.chunk(2, -1)
    return low | (high << 4)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """What `pack` was given."""
    return packed if bits == 8 else torch.cat((packed & 15, packed >> 4), -1)
