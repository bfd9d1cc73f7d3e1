"""Load, run and save language and reward models. The rest of core reads further names from here."""

from rlhf_core.contracts import AttentionPart as AttentionPart
from rlhf_core.contracts.models import Head as Head
from rlhf_core.models.attention import MASKED as MASKED
from rlhf_core.models.attention import Blocks as Blocks
from rlhf_core.models.attention import attend as attend
from rlhf_core.models.attention import attend_blocks as attend_blocks
from rlhf_core.models.attention import in_blocks as in_blocks
from rlhf_core.models.attention import seen_pairs as seen_pairs
from rlhf_core.models.attention import sinks_gradient as sinks_gradient
from rlhf_core.models.attention import visible_blocks as visible_blocks
from rlhf_core.models.attention import visits as visits
from rlhf_core.models.attention_pieces import across_pieces as across_pieces
from rlhf_core.models.config import DecoderConfig as DecoderConfig
from rlhf_core.models.decoder import Decoder as Decoder
from rlhf_core.models.definition import Definition as Definition
from rlhf_core.models.experts import Experts as Experts
from rlhf_core.models.experts import recording as recording
from rlhf_core.models.families import Architecture as Architecture
from rlhf_core.models.hf_config import DECODER as DECODER
from rlhf_core.models.hf_config import ConfigFields as ConfigFields
from rlhf_core.models.hf_config import decoder_family as decoder_family
from rlhf_core.models.kernels import find_kernels as find_kernels
from rlhf_core.models.layer import Layer as Layer
from rlhf_core.models.layer import Recurrent as Recurrent
from rlhf_core.models.layers import ACTIVATIONS as ACTIVATIONS
from rlhf_core.models.layers import MLP as MLP
from rlhf_core.models.layers import Attention as Attention
from rlhf_core.models.layers import Embedding as Embedding
from rlhf_core.models.layers import Linear as Linear
from rlhf_core.models.layers import RMSNorm as RMSNorm
from rlhf_core.models.loading import NO_REWARD_HEAD as NO_REWARD_HEAD
from rlhf_core.models.loading import check_model as check_model
from rlhf_core.models.loading import complete_table as complete_table
from rlhf_core.models.loading import define as define
from rlhf_core.models.loading import find_family as find_family
from rlhf_core.models.loading import fresh_model as fresh_model
from rlhf_core.models.loading import load_model as load_model
from rlhf_core.models.loading import local_directory as local_directory
from rlhf_core.models.loading import stored_head as stored_head
from rlhf_core.models.lora import Lora as Lora
from rlhf_core.models.lora import module_paths as module_paths
from rlhf_core.models.lora import resolve as resolve
from rlhf_core.models.lora import with_noise as with_noise
from rlhf_core.models.model import Model as Model
from rlhf_core.models.params import join as join
from rlhf_core.models.params import matching as matching
from rlhf_core.models.params import numbered as numbered
from rlhf_core.models.params import paths as paths
from rlhf_core.models.params import split as split
from rlhf_core.models.params import without_layers as without_layers
from rlhf_core.models.readers import Aux as Aux
from rlhf_core.models.readers import LayerContext as LayerContext
from rlhf_core.models.readers import RowReader as RowReader
from rlhf_core.models.readers import previous_tokens as previous_tokens
from rlhf_core.models.rope import rotate as rotate
from rlhf_core.models.weights import open_weights as open_weights
from rlhf_core.models.weights import save_tensors as save_tensors
from rlhf_core.runtime.caches import cached as cached
from rlhf_core.runtime.machine import platform as platform

__all__ = [
    "Definition",
    "Model",
]
"""What authors of trainers rely on."""
FOR_FAMILIES = (
    "ACTIVATIONS Architecture Attention Aux ConfigFields DecoderConfig Embedding Experts Layer LayerContext Linear MLP "
    "RMSNorm Recurrent RowReader across_pieces cached decoder_family open_weights paths previous_tokens rotate "
    "save_tensors"
)
"""What authors of model families rely on in addition."""
FOR_KERNELS = (
    "AttentionPart Blocks MASKED attend attend_blocks platform seen_pairs sinks_gradient visible_blocks "
    "visits"
)
"""What authors of kernels rely on."""
