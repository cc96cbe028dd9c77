"""The functional layer for research: pure functions of arrays, for ``jax.jit``, ``grad`` and ``vmap``.

::

    forward                  whole sequences, no cache: logits through a page table, with gradients at any bits
    prefill, decode, score   the compiled steps of the engine: read-only in the arena, fresh KV rows come back
    commit_pages, commit_kv  the only two writers of an arena
    plan                     bits from a snapshot of an engine
    PageTable                which pages hold which block at which bits; a leading axis gives several plans to vmap
    Past                     KV pages of earlier tokens, as attention reads them
    Resident                 every page of a model on the device: page tables of any plan, no engine needed

An engine's own arrays come from ``with engine.frozen() as (params, table, arena)``; its KV table is
``engine.parts.kv.table`` and its static shapes are ``engine.model.shapes``.
"""

from typing import Protocol

import jax

from pallas_kernels.paged_attention import Past as Past
from pallas_kernels.pages import Geometry
from planner import FloorRule, Plan, demote, price, promote
from pwjax import models
from pwjax.config import ModelConfig
from pwjax.engine.parts import Snapshot
from pwjax.engine.steps import decode as decode
from pwjax.engine.steps import prefill as prefill
from pwjax.engine.steps import score as score
from pwjax.errors import UsageError
from pwjax.memory import PageTable as PageTable
from pwjax.memory.arena import commit_kv as commit_kv
from pwjax.memory.arena import commit_pages as commit_pages
from pwjax.resident import Resident as Resident


class StaticModel(Protocol):
    """What :func:`forward` needs besides arrays: ``engine.model`` and ``resident.model`` are such."""

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        ...

    @property
    def geometry(self) -> Geometry:
        """Page geometry of the arena."""
        ...


def forward(model: StaticModel, params: dict, table: PageTable, arena: jax.Array, tokens: jax.Array) -> jax.Array:
    """Logits float32[B, T, V] of whole sequences ``tokens`` int32[B, T], experts read through the page table.

    Pure; ``model`` (``engine.model`` or ``resident.model``) is static. With arrays of an engine it is for use inside
    ``with engine.frozen() as (params, table, arena)``. Gradients: by float32 ``params``, equal to those of the dense
    form with the dequantized weights. ``jax.vmap`` over ``table`` runs several plans. Token ids are not checked: JAX
    clamps what is out of range.
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
    prices = price(table, seen.routing_choices, seen.routing_tokens, seen.residual)
    stages = FloorRule().stages(table, prices.damage)
    return demote(table, seen.bits, pages, stages, seen.moving, "Asked for.", prices=prices)
