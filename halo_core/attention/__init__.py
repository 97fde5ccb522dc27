"""Attention by the core's own kernels, behind the one place where transformers lets a model's attention be chosen.

Not for kernels (`halo_core.kernels.attention`): `socket.py` puts the given one into a model and takes it out again.
"""
