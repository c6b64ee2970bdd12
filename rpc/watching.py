"""The methods that look on: `daemon.metrics` and `events.subscribe`.

On the event loop. A subscription's events are sent by the connection, from when its id has been answered.
"""

from __future__ import annotations

from omlxd.rpc import params as p
from omlxd.rpc import wire
from omlxd.rpc.calls import Call
from omlxd.rpc.errors import ErrorBody, invalid_request
from omlxd.rpc.prometheus import prometheus_text


async def metrics(call: Call, params: p.MetricsParams) -> wire.Metrics | str:
    read = call.backend.metrics()
    return prometheus_text(read) if params.format == "prometheus" else wire.metrics(read)


async def subscribe(call: Call, params: p.SubscribeParams) -> str | ErrorBody:
    subscription = call.backend.subscribe(frozenset(params.topics))
    refusal = call.client.follow(subscription)
    if refusal is not None:
        subscription.close()
        return invalid_request(refusal)
    return subscription.id
