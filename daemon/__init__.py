"""The daemon room: settings, paths, the single-instance lock, logging, wiring and lifecycle."""
