"""Triton kernels for spans of the decoder's nodes, each beside its plain-torch oracle.

They round wherever the plain nodes round, so that a fused run differs from a plain one only by the
order of sums.
"""
