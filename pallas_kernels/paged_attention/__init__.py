"""Attention over KV pages of the arena joined with the fresh tokens of a dispatch."""

from pallas_kernels.paged_attention.api import IMPLEMENTATIONS as IMPLEMENTATIONS
from pallas_kernels.paged_attention.api import paged_attention as paged_attention
from pallas_kernels.paged_attention.api import problems as problems
from pallas_kernels.paged_attention.reference import Past as Past
from pallas_kernels.paged_attention.reference import pack_rows as pack_rows
from pallas_kernels.paged_attention.reference import unpack_rows as unpack_rows
