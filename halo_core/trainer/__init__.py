"""The loop and what surrounds it: steps, evaluation, reports, interrupts, the run's folder.

Not for building models or data: everything arrives as an argument. Nothing is imported here, so that the modules
without torch (`run_folder`, `trackers`, `policy`) can refuse a run before torch is imported.
"""
