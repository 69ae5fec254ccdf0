"""What an exporter demands of a Pull, Fetch or Introduce before anything else. Pure; exporter and offer call it."""

import hmac
from dataclasses import dataclass, field

from contracts.errors import Incompatible, PullNotFound, Stale
from contracts.handover import Fetch, Introduce, Pull
from contracts.kv import KvLayout


@dataclass(frozen=True, slots=True)
class Handshake:
    """This worker's side. `secret` "": the cluster has none."""

    incarnation: int
    layout: KvLayout
    secret: str = field(default="", repr=False)

    def check(self, message: Pull | Fetch | Introduce) -> None:
        """Raises PullNotFound for a wrong secret (a stranger learns nothing), Stale for another incarnation,
        Incompatible with the first difference and both values."""
        if not hmac.compare_digest(self.secret.encode(), message.secret.encode()):
            raise PullNotFound("no such attempt")
        if message.incarnation != self.incarnation:
            raise Stale(f"incarnation: {self.incarnation} here, {message.incarnation} asked for")
        difference = self.layout.difference(message.layout)
        if difference is not None:
            raise Incompatible(difference)
