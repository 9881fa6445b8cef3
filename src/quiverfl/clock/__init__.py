"""When things happen: devices, links and absence, and runs in which not everybody waits."""
