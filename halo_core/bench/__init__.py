"""Measures the product's own training step on a model of a published shape: `fixture.py` is what it trains on,
`random_weights.py` what it starts from, `wire.py` counts bytes, `measure.py` takes the times, `receipt.py` keeps them.
Not for training something anyone wants (`halo_core.trainer`).
"""
