"""Puts a router together from its configuration. Called by the composition root and by tests."""

from collections.abc import Callable

from contracts.config import Config
from contracts.seams import load_plug
from contracts.session import Hello
from contracts.workers import Role
from protos.links.base import Link
from router.fleet import Fleet, WorkerSource
from router.ledger import Ledger
from router.observer import RouterObserver
from router.service import RouterService
from router.sessions import ModelIdentity
from telemetry.tracing import Tracing


def build_service(
    config: Config,
    *,
    router_id: str,
    incarnation: int,
    link: Link,
    registry: WorkerSource,
    identity: ModelIdentity,
    tracing: Tracing,
    observer: RouterObserver,
    exposition: Callable[[], str],
) -> RouterService:
    """A service that is not started yet. Raises ConfigError for an unknown policy."""
    roles = frozenset({Role.DECODE} if config.cluster.mode == "aggregated" else {Role.PREFILL, Role.DECODE})
    policy = load_plug("policy", config.router.policy)
    ledger = Ledger({role: policy.create() for role in sorted(roles, key=lambda role: role.value)})
    hello = Hello(router_id, incarnation, config.cluster.secret)
    fleet = Fleet(
        registry=registry,
        link=link,
        ledger=ledger,
        hello=hello,
        identity=identity,
        roles=roles,
        observer=observer,
    )
    return RouterService(
        router_id=router_id,
        incarnation=incarnation,
        config=config.router,
        limits=config.limits,
        growth_tokens=config.kv.growth_tokens,
        fleet=fleet,
        ledger=ledger,
        tracing=tracing,
        observer=observer,
        exposition=exposition,
    )
