"""The commands people type; not for logic that the Python API needs as well."""
