"""Requests from this server's own router: it has made the plan already, and proves itself by a secret.

``hypic launch`` draws the secret and gives it to the router and to the workers it starts, in their environment. A router
tokenises, cuts and declines with this same package under these same flags, so a worker takes its plan as it is.
"""

from __future__ import annotations

import hmac
import os
from typing import Any

HEADER = "x-hypic-router"
VARIABLE = "HYPIC_ROUTER_TOKEN"


def is_router(request: Any) -> bool:
    """Whether FastAPI's `request` comes from the router that started this server."""
    secret = os.environ.get(VARIABLE, "")
    given = getattr(request, "headers", {}).get(HEADER, "") if secret else ""
    return bool(secret) and hmac.compare_digest(secret.encode(), given.encode())
