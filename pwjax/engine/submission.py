"""What a request must satisfy to be queued: known tokens, a prompt that the context holds, KV that the budget holds."""

from pwjax.engine.parts import Parts
from pwjax.engine.quality import Demand
from pwjax.engine.requests import Request
from pwjax.errors import PromptError


def checked(parts: Parts, request: Request, frozen: bool) -> Request:
    """The request with token ids; PromptError, with the numbers, where it can never run.

    ``frozen``: the committed bits stay as they are.
    """
    if request.prompt_token_ids is None and parts.tokenizer is None:
        raise PromptError("this model has no tokenizer.json; give prompt_token_ids instead of a prompt")
    config, context = parts.shapes.config, parts.shapes.context
    request = request.tokenized(parts.tokenizer, config.vocab_size)  # pyright: ignore[reportArgumentType]
    length = len(request.prompt_token_ids or ())
    new = 0 if request.score else request.sampling.max_tokens
    if length + min(new, 1) > context:
        limit = "model" if context == config.max_positions else "--context"
        raise PromptError(
            f"the prompt has {length} tokens, but the {limit} allows {context} for prompt and new tokens together; "
            "shorten the prompt" + ("" if limit == "model" else " or raise --context")
        )
    pages = parts.kv.pages_for(min(context, length + new))
    lowest, demand = _weights_pages(parts, request, frozen)
    room = parts.memory.capacity_pages - lowest
    if pages > room:
        page_bytes = parts.memory.page_bytes
        raise PromptError(
            f"the request needs {pages * page_bytes} bytes of KV cache for {length} prompt tokens and up to "
            f"{new} new ones, but at most {max(0, room) * page_bytes} are left beside the "
            f"weights{demand}; lower max_tokens{' or the demand' if demand else ''}, or raise --memory-budget"
        )
    return request


def _weights_pages(parts: Parts, request: Request, frozen: bool) -> tuple[int, str]:
    """Fewest pages of weights while the request runs, and what it demands, in words (empty: nothing)."""
    demand, table, committed = Demand.of([request]), parts.table, parts.pager.committed
    words = [f"min_bits {request.min_bits}"] if request.min_bits else []
    words += [f"max_damage {request.max_damage:g}"] if request.max_damage is not None else []
    text = f" at {' and '.join(words)}" if demand else ""
    if frozen:
        if not demand.met(table, committed):
            raise PromptError(
                f"the request demands {' and '.join(words)}, but precision is fixed: the lowest block has "
                f"{committed.min()} bits, the predicted damage is {table.total_damage(committed):.4g}; leave the "
                "demand out, or load the model with a policy that moves precision"
            )
        return table.total_pages(committed), text
    if not demand:
        return parts.memory.weights_min_pages, text
    pages = demand.smallest_pages(table)
    if pages is None:
        raise PromptError(
            f"the request demands {' and '.join(words)}, but this model has at most {table.widths[-1]} bits, with a "
            f"predicted damage of {table.total_damage(table.widths[-1]):.4g}"
        )
    return pages, text
