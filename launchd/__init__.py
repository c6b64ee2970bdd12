"""The launchd room: the agent's plist, `launchctl` and socket activation. Standard library only."""
