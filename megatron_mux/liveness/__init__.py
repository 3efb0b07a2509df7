"""Detects ranks that died or stall, and ends all ranks then, so that none waits for ever."""

from megatron_mux.liveness.heartbeat import Heartbeat as Heartbeat
from megatron_mux.liveness.liveness import Liveness as Liveness
