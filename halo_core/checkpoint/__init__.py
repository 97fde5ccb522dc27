"""Saving a run so that it can go on, and exporting the trained model.

Not for when to save: the loop decides. Nothing is imported here, so that modules without torch stay without it.
"""
