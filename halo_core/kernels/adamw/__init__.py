"""AdamW's update of one step: `reference.py` specifies it, `fused.py` does it in one pass over memory, `noise.py` gives
the random bits that both round by. Not for state or groups: those are the optimizer's (`halo_core.optim`).
"""
