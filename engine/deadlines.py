"""How long a model may stay in each state that is not an end: what waits for it is told then, and can go on.

A value, handed to the pool; the times are generous, for they are not what bounds work but what bounds waiting for work
that will never be done. Waiting for room has its own bounds, in `engine/room.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds.

    `stalled_s`: LOADING without a sign of the load; far more than 64 MB of weights take from the slowest drive, or the
    first import of mlx and transformers. `drain_s`: DRAINING, for the model's live requests. `let_go_s`: UNLOADING, for
    its engine, which has a prefill turn and a step to end.
    """

    stalled_s: float = 300.0
    drain_s: float = 600.0
    let_go_s: float = 30.0
