"""The rpc room: framing, connections, dispatch, wire types, client. Of the engine it imports `engine.api` alone."""
