"""Mosaic for Halo: `facts.py` is the plugin, `model.py` the model. No import here: facts load without torch."""
