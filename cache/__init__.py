"""The cache room: blocks, checkpoints, the prefix tree, the hot tier and the registry. Imports no other room."""
