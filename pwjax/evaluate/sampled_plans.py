"""Plans to test damage tables on: changes of one block, and mixed plans that hold equal pages.

Mixed plans must differ in quality, or their ranks are noise: two plans drawn at random are about equally bad. So every
plan is the greedy optimum of some other idea of damage, times lognormal noise a block (sigma drawn from 0.25 to 2, so
from near that idea to anything). The ideas take turns::

    FORM       each damage table of the model
    hotness    router weight of the expert, times weights, a quarter for every bit
    layers     noise that all blocks of a layer and matrix share, in place of noise a block
    random     all blocks alike: noise alone decides
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from planner import BlockTable
from planner.solve import fit

SIGMA = (0.25, 2.0)


class SampledPlan(NamedTuple):
    """``bits`` int[n] of all blocks, and in words how they came about."""

    bits: np.ndarray
    recipe: str


def single_changes(table: BlockTable, count: int, seed: int, others: int) -> list[tuple[int, SampledPlan]]:
    """``(block, plan)``: all blocks at ``others`` bits but one, at a quantized width; ``count`` of all there are.

    Drawn evenly and without repetition, in the order of blocks.
    """
    widths = [b for b in table.widths if b not in (16, others)]
    everything = table.blocks * len(widths)
    drawn = np.random.default_rng([seed, 0]).choice(everything, min(count, everything), replace=False)
    plans = []
    for block, column in zip(*np.divmod(np.sort(drawn), len(widths)), strict=True):
        bits = np.full(table.blocks, others)
        bits[block] = widths[column]
        plans.append((int(block), SampledPlan(bits, f"{table.name(int(block))} at {widths[column]} bits")))
    return plans


def target_pages(table: BlockTable, mean_bits: float) -> int:
    """Pages of all blocks at ``mean_bits``, between two widths on the straight line of their pages."""
    low, high = int(np.floor(mean_bits)), int(np.ceil(mean_bits))
    share = mean_bits - low
    return round((1 - share) * table.total_pages(low) + share * table.total_pages(high))


def greedy_plan(table: BlockTable, damage: np.ndarray, pages: int, rng: np.random.Generator) -> np.ndarray:
    """Bits int[n] of the best plan under ``damage`` float64[n, B] that holds ``pages``, quantized widths only.

    ``damage`` is that of a served token, whatever the table's own is: of ``table`` only the pages count.
    What the greedy leaves over goes to blocks in random order, so that plans are equal to the page where the sizes of
    steps allow it.
    """
    quantized = [j for j, b in enumerate(table.widths) if b != 16]
    widths = tuple(table.widths[j] for j in quantized)
    # Routing is inside ``damage``: the table of a conditional form would count it once more. Predictions are of average
    # text, so no prompt residual is wanted; its heads would be for all widths.
    part = replace(
        table, widths=widths, damage=damage[:, quantized], conditional=False, pages=table.pages[:, quantized],
        heads=None, kinds=None,
    )  # fmt: skip
    level = part.level(fit(part, pages).bits)
    rows = np.arange(part.blocks)
    left = pages - int(part.pages[rows, level].sum())
    while left > 0:
        higher = np.minimum(level + 1, len(widths) - 1)
        cost = part.pages[rows, higher] - part.pages[rows, level]
        able = np.flatnonzero((cost > 0) & (cost <= left))
        if not able.size:
            break
        block = rng.choice(able)
        level[block] += 1
        left -= int(cost[block])
    return part.bits(level)


def mixed_plans(
    table: BlockTable, damage: Mapping[str, np.ndarray], mean_bits: float, count: int, seed: int
) -> list[SampledPlan]:
    """``count`` plans of equal pages at ``mean_bits``; ``damage`` float64[n, B] by form, of a served token."""
    rng = np.random.default_rng([seed, round(mean_bits * 1000)])
    pages = target_pages(table, mean_bits)
    halving = table.params[:, None] * 4.0 ** -np.array(table.widths)
    mass = np.repeat(table.routing_mass.reshape(-1), 2)[:, None]
    ideas = {**damage, "hotness": (mass + mass.mean() / 100) * halving, "layers": halving, "random": halving}
    groups = np.arange(table.blocks) // (2 * table.experts) * 2 + np.arange(table.blocks) % 2
    plans = []
    for name in [list(ideas)[i % len(ideas)] for i in range(count)]:
        sigma = float(np.exp(rng.uniform(*np.log(SIGMA))))
        noise = rng.normal(size=2 * table.layers)[groups] if name == "layers" else rng.normal(size=table.blocks)
        # A layer's noise alone would make blocks of a layer ties, which the greedy breaks by their number.
        noise = sigma * noise + (0.25 * rng.normal(size=table.blocks) if name == "layers" else 0)
        bits = greedy_plan(table, ideas[name] * np.exp(noise)[:, None], pages, rng)
        plans.append(SampledPlan(bits, f"{name}, noise {sigma:.2f}"))
    return plans
