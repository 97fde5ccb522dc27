"""The model families that come with Halo: facts only, one module per family, offered through the public hooks.

Not for mechanisms: those live in `halo_core` and read these facts. `configs/` holds the config.json values of
published checkpoints, so that a plan needs no network; where a checkpoint also holds a vision or audio part, only
what describes its language model is kept.
"""
