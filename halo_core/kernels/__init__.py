"""Kernels: each a plain torch reference, which is its specification, and beside it faster twins of the same signature.

Not for choosing in the middle of a run: `runtime.resolve` chooses once. The names a person may switch are in
`halo_core.support.KERNELS`.
"""
