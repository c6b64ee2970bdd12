"""Rows on their way into and out of the batch: what a row starts with, and what its tokens' log-probabilities say.

Pure glue between a request and `engine.batch`; runs on the engine thread and keeps nothing.
"""

from __future__ import annotations

from omlxd.engine.api import TokenLogprob
from omlxd.engine.drawing import RowStart, RowToken
from omlxd.engine.prefill import Prefill
from omlxd.engine.request import Request
from omlxd.engine.sampling import SamplerRow, processors, read_likely
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
        num_likely=job.logprobs,
    )


def logprob(row: RowToken, decoder: Decoder) -> TokenLogprob | None:
    """The token's log-probability with the best ones'; None, at no cost, for a row that does not want them."""
    if row.likely is None:
        return None
    found = read_likely(row.likely)
    texts = [decoder.decode([token_id], skip_special_tokens=False) for token_id, _ in found]
    (token_id, value), *rest = found
    best = [TokenLogprob(id, text, value) for (id, value), text in zip(rest, texts[1:], strict=True)]
    return TokenLogprob(token_id, texts[0], value, best)
