"""The fleet on real clusters: run by `make fleet-test`, in an environment with Ray and submitit."""
