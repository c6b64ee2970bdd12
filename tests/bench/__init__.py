"""The benchmark suite: `make bench` runs its measures, pytest only the tests of how their results are read."""
