"""When two tensors count as equal, and the report of all that differ.

Not for what is compared: see `conformance.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

ABSOLUTE = 1e-5
"""Largest difference of one element, fp32. Two correct orders of the same sums differ by a few 1e-6: at most 3e-6 was
seen over the built-in families, in gradients of norm 20."""

REORDERED = 5e-5
"""The same where attention itself sums in another order than the reference's. At most 1.4e-5 was seen, in the gradient
of an embedding, norm 20, of a model that does not scale its attention scores."""

RELATIVE = 1e-3
"""Largest norm of a difference, as a share of the reference's norm. It sees what the others cannot: a gradient whose
every element is small and wrong."""

NOISE = 1e-7
"""Root mean square of a tensor that is rounding noise alone, such as the gradient of a bias on attention keys, which
no softmax can see. Below it only the element's difference is asked."""


def difference(found: Tensor, expected: Tensor, allowed: float = ABSOLUTE) -> str | None:
    """Return how two tensors differ, in words, or None when they count as equal. allowed: per element."""
    if found.shape != expected.shape:
        return f"shape {list(found.shape)}, expected {list(expected.shape)}"
    if not expected.is_floating_point():
        return None if bool((found == expected).all()) else "different integers"
    if not expected.numel():
        return None
    found, expected = found.double(), expected.double()
    gap = (found - expected).abs().max().item()
    if not gap <= allowed:  # also when either is not a number
        return f"differs by {gap:.2e} at most, allowed {allowed:.0e}"
    norm, floor = expected.norm().item(), NOISE * expected.numel() ** 0.5
    share = (found - expected).norm().item() / max(norm, floor)
    if norm > floor and share > RELATIVE:
        return f"differs by {share:.2e} of its norm, allowed {RELATIVE:.0e}"
    return None


def differences(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], allowed: float = ABSOLUTE
) -> list[str]:
    """Return one line per name that is missing on one side or whose tensors differ; nothing when all are equal."""
    lines = [f"{name}: missing" for name in expected if name not in found]
    lines += [f"{name}: not in the reference" for name in found if name not in expected]
    for name, tensor in expected.items():
        if name in found and (text := difference(found[name], tensor, allowed)):
            lines.append(f"{name}: {text}")
    return lines


def assert_same(
    what: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], allowed: float = ABSOLUTE
) -> None:
    """Raise when any name or tensor differs.

    Raises:
        AssertionError: naming the first twelve that differ, and how many do.
    """
    lines = differences(found, expected, allowed)
    if lines:
        shown = "\n  ".join(lines[:12])
        raise AssertionError(f"{what}: {len(lines)} of {len(expected)} differ\n  {shown}")
