"""From a source folder to a model that trains: meta build, sockets, weights, last hidden states and the head.

Not for training steps, nor for writing a model back. No torch on import of this package alone.
"""
