"""Parameters spread over processes: `shard.py` cuts a model, `owners.py` says who sums each gradient, `sharded.py` is
what a training step asks, `norm.py` the arithmetic over cut gradients. Not for tokens that travel to experts
(`halo_core.expert_parallel`).
"""
