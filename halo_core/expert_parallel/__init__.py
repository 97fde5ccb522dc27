"""Experts spread over processes: `dispatcher.py` is the interface that sends tokens to where their experts are,
`all_to_all.py`, `deepep.py` and `local.py` its forms, `choose.py` the rule between them, `deepep_start.py` and
`preflight.py` what happens before weights are read, `experts.py` what a model's experts sockets call. Not for how
expert weights are stored (`halo_core.sharding`).
"""
