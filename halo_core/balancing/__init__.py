"""Keeping the load of experts even. Not for routing: routers stay transformers' own."""
