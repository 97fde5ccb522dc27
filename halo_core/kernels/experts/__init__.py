"""The routed experts of one layer: `weights.py` is the view both forms read, `reference.py` the specification,
`grouped.py` its fast twin, `choice.py` the rule between them. Not for routing, nor for sending tokens to other ranks.
"""
