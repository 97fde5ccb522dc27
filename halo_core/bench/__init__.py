"""Measures the product's own training step: `shape.py` is the model's shape, `random_weights.py` fills it,
`random_rows.py` and `work.py` feed it, `measure.py` takes the times, `wire.py` counts bytes, `receipt.py` keeps
the result and `page.py` shows all of them. Not for training something anyone wants (`halo_core.trainer`).
"""
