"""The conformance kit: what shows that a family's Supported cells work and that everything else refuses.

Not imported by a run. Plugin authors use it as the built-in families' tests do: see `conformance.prove_family`.
"""
