"""The worker process: executes the server's commands on one device."""
