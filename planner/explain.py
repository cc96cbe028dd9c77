"""Why one block has the bits it has: the factors of its damage, its floor, and its place in the queue both ways."""

from typing import TYPE_CHECKING

import numpy as np

from planner.hull import hull
from planner.tables import MATRICES, BlockTable

if TYPE_CHECKING:
    from planner.plan import Plan


def find_block(table: BlockTable, text: str) -> int:
    """The block of ``"17"`` or ``"layer.expert.matrix"`` (``"0.8.down"``); ValueError where there is none."""
    parts = text.split(".")
    try:
        if len(parts) == 1:
            block = int(text)
        else:
            layer, expert = int(parts[0]), int(parts[1])
            matrix = MATRICES.index(parts[2])
            if not (len(parts) == 3 and 0 <= layer < table.layers and 0 <= expert < table.experts):
                raise ValueError
            block = (layer * table.experts + expert) * 2 + matrix
        if not 0 <= block < table.blocks:
            raise ValueError
        return block
    except (ValueError, IndexError):
        raise ValueError(
            f"there is no block {text!r}; give a number below {table.blocks}, or layer.expert.matrix with layers below "
            f"{table.layers}, experts below {table.experts} and {' or '.join(MATRICES)}, such as 0.0.down"
        ) from None


def explain_block(plan: "Plan", block: int) -> str:
    """Readable lines: bits, damage and what it is made of, floor and stage, rank among the next moves."""
    table, prices = plan.table, plan.prices
    level = table.level(plan.bits)
    bits, at = int(plan.bits[block]), int(level[block])
    layer, expert, _ = table.locate(block)
    was = "" if plan.before[block] == bits else f", planned from {int(plan.before[block])}"
    curve = ", ".join(f"{b}: {d:.4g}" for b, d in zip(table.widths, plan.damages[block], strict=True))
    mass = f"{table.routing_mass[layer, expert]:.4f} of its layer in calibration"
    if prices is not None and prices.routing is not None:
        mass += f", now x{prices.routing[block]:.3f} in damage"
    lines = [
        f"{table.name(block)} (block {block}): {bits} bits{was}",
        f"  pages     {int(table.pages[block, at])}",
        f"  damage    {plan.damages[block, at]:.4g} a served token (bits: {curve})",
        f"  routing   {mass}",
    ]
    if prices is not None and prices.mixture is not None:
        shares = ", ".join(f"{s:.0%} text {kind}" for kind, s in enumerate(prices.mixture, 1) if s >= 0.005)
        lines.append(f"  text      routed like {shares} of calibration; damage a routed token is theirs")
    if prices is not None and prices.residual is not None:
        eta = ", ".join(f"{b}: x{f:.3f}" for b, f in zip(table.widths, prices.residual[block], strict=False))
        lines.append(f"  residual  the prompts change a step down to its bits by {eta}")
    else:
        reason = "the model has none" if table.heads is None else "no prompt is running, or the policy leaves it out"
        lines.append(f"  residual  none: {reason}")
    floor = int(table.widths[0]) if plan.floor is None else int(plan.floor[block])
    advice = "" if table.floors is None else f"; calibration advises {int(table.floors[block])}"
    lines.append(f"  floor     {floor} bits at stage {plan.stage}{advice}")
    bottom = np.minimum(level, 0 if plan.floor is None else table.level(plan.floor))
    top = np.full(table.blocks, len(table.widths) - 1)
    lines.append("  down      " + _rank(plan, level, bottom, block, down=True))
    lines.append("  up        " + _rank(plan, level, top, block, down=False))
    return "\n".join(lines)


def _rank(plan: "Plan", level: np.ndarray, end: np.ndarray, block: int, down: bool) -> str:
    """Where the block's next move stands among those of all blocks, by damage a page."""
    steps = hull(plan.damages, plan.table.pages, level, end)
    blocks, index = np.unique(steps.block, return_index=True)
    order = blocks[np.argsort(index, kind="stable")]
    found = np.flatnonzero(order == block)
    if not found.size:
        return f"no move: it is at its {'floor' if down else 'best'}"
    i = int(index[blocks == block][0])
    rate = float(steps.rate[i]) * (1 if down else -1)
    return (
        f"to {plan.table.widths[int(steps.to[i])]} bits, {int(steps.pages[i])} pages at {rate:.4g} damage a page: "
        f"rank {int(found[0]) + 1} of {len(order)} (1 is the first to {'be demoted next' if down else 'rise'})"
    )
