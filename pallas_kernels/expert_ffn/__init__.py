"""Expert feed-forward on bit planes: grouping, gate_up, activation, down and the weighted sum in one op."""

from pallas_kernels.expert_ffn.api import IMPLEMENTATIONS as IMPLEMENTATIONS
from pallas_kernels.expert_ffn.api import expert_ffn as expert_ffn
from pallas_kernels.expert_ffn.api import problems as problems
from pallas_kernels.expert_ffn.reference import dense_expert_ffn as dense_expert_ffn
from pallas_kernels.expert_ffn.reference import read_block as read_block
