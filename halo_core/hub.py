"""Whether the hub can be asked at all, found out in a second instead of after the client's many retries.

Not for fetching anything: huggingface_hub and datasets do that. No torch.
"""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

TIMEOUT = 5.0
"""Seconds to wait for a connection."""


def obstacle() -> str | None:
    """Return why the hub cannot be asked from here, or None when it answers (or a proxy stands in between)."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return "HF_HUB_OFFLINE forbids asking the hub"
    if os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        return None
    from huggingface_hub import constants

    address = urlsplit(constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((str(address.hostname), port), timeout=TIMEOUT).close()
    except OSError as fault:
        return f"the hub cannot be reached ({fault.strerror or fault})"
    return None
