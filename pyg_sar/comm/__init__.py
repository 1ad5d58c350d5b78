"""Workers: groups, backends, shared memory, heartbeats, and how workers are started."""

from pyg_sar.comm.communicator import Communicator
from pyg_sar.comm.group import current, finalize

__all__ = ["Communicator", "current", "finalize"]
