"""Triton kernels over head-major blocks `[N, K, B, D]`, each beside its plain-torch oracle."""
