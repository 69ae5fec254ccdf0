"""The clusters on which the soak runs its batches."""

from dataclasses import dataclass, replace

from contracts.config import Config, TransferConfig
from engine.runners.base import StepPlan
from tests.helpers.simulated_cluster import simulated_config, step_cost
from tests.helpers.simulated_engine import simulated_layout

BLOCK = 4


@dataclass(frozen=True, slots=True)
class Ground:
    """A cluster, and how its clients behave. `slow` stretches its steps, so that hand-overs outlast the pauses between
    signs of life; `copy` is about what a copy of blocks takes, in seconds. `leaving` is the share of clients that go
    away early, after `stay` seconds at most; `pace` stretches the pauses between their arrivals.

    No fault of a plan leaves anything to a lease: every stream's end is heard in the end. So leases are long, except
    where they shall end during a hand-over.
    """

    prefill: int = 2
    decode: int = 2
    routers: int = 1
    blocks: int = 128
    step_tokens: int = 32
    max_running: int = 16
    slow: float = 1.0
    copy: float = 0.0
    leaving: float = 0.1
    stay: float = 0.2
    pace: float = 1.0
    lease: float = 15.0

    @property
    def spare(self) -> bool:
        """Whether a request whose worker is lost finds another one."""
        return self.prefill > 1 and self.decode > 1

    def config(self) -> Config:
        config = simulated_config(
            prefill=self.prefill,
            decode=self.decode,
            blocks=self.blocks,
            block_size=BLOCK,
            step_tokens=self.step_tokens,
            max_running=self.max_running,
        )
        transfer = TransferConfig(
            transport="memory",
            frame_bytes=3 * simulated_layout(BLOCK).block_bytes,
            lease_seconds=self.lease,
            park_seconds=1.0,
            silence_seconds=2.0,
        )
        return replace(config, cluster=replace(config.cluster, routers=self.routers), transfer=transfer)

    def cost(self, plan: StepPlan) -> float:
        """Seconds of a step."""
        return self.slow * step_cost(plan)


GROUNDS = (
    Ground(),
    Ground(prefill=1, decode=1),
    Ground(routers=2, copy=0.001),
    Ground(prefill=3, decode=1),
    # room for two or three requests; long ones outgrow what they reserved, and late writes would hit the next one
    Ground(blocks=36, routers=2, copy=0.02, leaving=0.7, stay=4.0, pace=0.4),
    Ground(step_tokens=5, slow=300.0, lease=2.0, stay=60.0, pace=30.0),  # a prompt takes many seconds
    Ground(max_running=2, routers=2),
    Ground(step_tokens=8, slow=50.0, routers=2, copy=0.1, lease=0.6, stay=10.0, pace=5.0),
)
