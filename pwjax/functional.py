"""The functional layer: the pure forward over a page table, and plans from a snapshot."""

import jax

from planner import FloorRule, Plan, demote, price, promote
from pwjax import models
from pwjax.engine.parts import Model, Snapshot
from pwjax.errors import UsageError
from pwjax.memory import PageTable


def forward(model: Model, params: dict, table: PageTable, arena: jax.Array, tokens: jax.Array) -> jax.Array:
    """Logits float32[B, T, V] of whole sequences ``tokens`` int32[B, T], experts read through the page table.

    Pure; ``model`` (``engine.model``) is static. For ``jax.jit``, inside ``with engine.frozen() as (params, table,
    arena)``. Token ids are not checked: JAX clamps what is out of range.
    """
    paged = models.Paged(arena, table.bits, table.pages, model.geometry)
    return models.logits(model.config, params, models.forward(model.config, params, tokens, paged=paged).hidden)


def plan(snapshot: Snapshot, target_bytes: int) -> Plan:
    """A plan that releases ``target_bytes`` of weights at the least damage; negative: spends them on promotions.

    Floors and blocks in flight are respected; the plan's ``status`` says whether the target is met. Hand it to
    ``engine.apply``. UsageError where the target is not a number of bytes.
    """
    if not isinstance(target_bytes, int):
        raise UsageError(f"target_bytes must be a whole number of bytes, got {target_bytes!r}")
    table, seen, page_bytes = snapshot
    if target_bytes < 0:
        spare_pages = min(seen.free_pages, -target_bytes // page_bytes)
        return promote(table, seen.bits, spare_pages, None, seen.moving, "Asked for.")
    pages = -(-target_bytes // page_bytes)
    prices = price(table, seen.routing_mass, seen.routing_tokens, seen.residual)
    stages = FloorRule().stages(table, prices.damage)
    return demote(table, seen.bits, pages, stages, seen.moving, "Asked for.", prices=prices)
