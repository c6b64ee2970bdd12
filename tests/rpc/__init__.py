"""The wire against a fake backend: no mlx, no engine."""
