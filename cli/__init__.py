"""The command line room: `omlxctl`, a thin client of the socket. Loads neither mlx nor the engine."""
