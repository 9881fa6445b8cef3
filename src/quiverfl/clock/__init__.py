"""When things happen: devices, links and absence, and runs without common rounds."""
