"""What an exporter demands of a Pull before it looks at the attempt. Pure; the exporter calls it."""

import hmac
from dataclasses import dataclass, field

from contracts.errors import Incompatible, PullNotFound, Stale
from contracts.handover import Pull
from contracts.kv import KvLayout


@dataclass(frozen=True, slots=True)
class Handshake:
    """This worker's side. `secret` "": the cluster has none."""

    incarnation: int
    layout: KvLayout
    transport: str
    secret: str = field(default="", repr=False)

    def check(self, pull: Pull) -> None:
        """Raises PullNotFound for a wrong secret (a stranger learns nothing), Stale for another incarnation,
        Incompatible with the first difference and both values."""
        if not hmac.compare_digest(self.secret.encode(), pull.secret.encode()):
            raise PullNotFound("no such attempt")
        if pull.incarnation != self.incarnation:
            raise Stale(f"incarnation: {self.incarnation} here, {pull.incarnation} asked for")
        difference = self.layout.difference(pull.layout)
        if difference is None and pull.transport != self.transport:
            difference = f"transport: {self.transport!r} here, {pull.transport!r} there"
        if difference is not None:
            raise Incompatible(difference)
