"""Rows on their way into and out of the batch: what a row starts with, and what its tokens' log-probabilities say.

Pure glue between a request and `engine.batch`; runs on the engine thread and keeps nothing.
"""

from __future__ import annotations

from omlxd.engine.api import TokenLogprob
from omlxd.engine.joining import RowStart, RowToken
from omlxd.engine.prefill import Prefill
from omlxd.engine.request import Request
from omlxd.engine.sampling import SamplerRow, logprobs_of, processors
from omlxd.engine.text import Decoder


def row_start(request: Request, prefill: Prefill, *, vocab_size: int) -> RowStart:
    """The row of a request whose prompt is computed, or which comes back with an answer begun."""
    job = request.job
    return RowStart(
        id=job.id,
        caches=prefill.caches,
        tokens=prefill.rest,
        sampler=SamplerRow(job.sampling, len(request.drawn)),
        processors=[
            *processors(
                job.sampling,
                job.logit_bias,
                prompt=job.prompt if request.drawn else job.prompt[:-1],
                answer=request.drawn[:-1] if request.drawn else None,
                vocab_size=vocab_size,
            ),
            *request.steer(),
        ],
    )


def logprob(row: RowToken, count: int, decoder: Decoder) -> TokenLogprob | None:
    """The token's log-probability with the `count` best; None for 0, which costs nothing."""
    if not count:
        return None

    def text(token_id: int) -> str:
        return decoder.decode([token_id], skip_special_tokens=False)

    chosen, best = logprobs_of(row.logprobs, row.token_id, count)
    top = [TokenLogprob(id, text(id), value) for id, value in best]
    return TokenLogprob(row.token_id, text(row.token_id), chosen, top)
