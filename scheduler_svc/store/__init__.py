"""Records of requests that survive a scheduler, and the lease that elects the leader."""
