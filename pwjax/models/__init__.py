"""Functional Flax models: one decoder in a dense and a paged form."""

from pwjax.models.decoder import Decoder as Decoder
from pwjax.models.decoder import Fresh as Fresh
from pwjax.models.decoder import Output as Output
from pwjax.models.decoder import apply as apply
from pwjax.models.decoder import forward as forward
from pwjax.models.decoder import init_params as init_params
from pwjax.models.decoder import logits as logits
from pwjax.models.decoder import loss_fn as loss_fn
from pwjax.models.decoder import next_token_nll as next_token_nll
from pwjax.models.decoder import routing_mass as routing_mass
from pwjax.models.layer import LayerOutput as LayerOutput
from pwjax.models.layer import decoder_layer as decoder_layer
from pwjax.models.layer import layer_params as layer_params
from pwjax.models.layer import whole_sequences as whole_sequences
from pwjax.models.moe import Paged as Paged
from pwjax.models.moe import RoutingStats as RoutingStats
from pwjax.models.moe import Trace as Trace
