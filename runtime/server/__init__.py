"""The runtime server: workers, generations, trials, and the gRPC service in front of them."""
