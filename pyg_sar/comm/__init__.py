"""Workers: groups, backends, shared memory, heartbeats, and how workers are started."""
