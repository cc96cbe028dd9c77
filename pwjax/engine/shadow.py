"""The shadow sample: generated tokens whose distribution is kept, to be held against one at high bits later.

A request's predicted damage is a promise about tokens nobody checks. Of a sample of them the log keeps the
log-probabilities that were used and the damage that was predicted for the bits then in force; after the run
:mod:`pwjax.evaluate.shadow` runs the same prefixes at the highest bits of the budget. The decode program gives these
log-probabilities anyway where it is asked to, so nothing is compiled for them and no token changes.
"""

from zlib import crc32

from pwjax.engine.requests import Request

# Share of the tokens of a request with ``max_damage`` that is sampled unless told otherwise.
SHARE = 1 / 32


def share_of(request: Request, asked: float | None) -> float:
    """Share of a request's generated tokens to sample; ``asked`` None: :data:`SHARE` of those that bound damage."""
    if request.score:
        return 0.0
    if asked is None:
        return 0.0 if request.max_damage is None else SHARE
    return asked


def chosen(order: int, index: int, share: float) -> bool:
    """Whether generated token ``index`` of the sequence ``order`` is in the sample; spread evenly and without state."""
    return crc32(b"%d %d" % (order, index)) < share * 2**32
