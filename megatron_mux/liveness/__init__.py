"""Whether every rank still lives and gets on, so that none waits for one that does not."""

from megatron_mux.liveness.heartbeat import Heartbeat as Heartbeat
from megatron_mux.liveness.watch import Liveness as Liveness
