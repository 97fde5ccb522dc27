"""Optimizers and learning rate schedules. Not for gradients: clipping and accumulation belong to the step."""
