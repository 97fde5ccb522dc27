"""What is trained: methods as columns, collation and terms. Not for the loop: see `halo_core.trainer`."""
