"""Sample completions and conversations: which tokens follow, what ends them, and how devices share the work."""

from rlhf_core.contracts import Rollouts as Rollouts
from rlhf_core.sampling.loop import most_steps as most_steps
from rlhf_core.sampling.placement import cache_bytes as cache_bytes
from rlhf_core.sampling.sampler import SHORTEST_BUCKET as SHORTEST_BUCKET
from rlhf_core.sampling.sampler import ConversationSampler as ConversationSampler
from rlhf_core.sampling.sampler import Sampler as Sampler
from rlhf_core.sampling.sampler import SamplingMesh as SamplingMesh
from rlhf_core.sampling.sampler import SamplingOptions as SamplingOptions
from rlhf_core.sampling.sampler import bucket as bucket
from rlhf_core.sampling.sampler import make_sampler as make_sampler
from rlhf_core.sampling.schedule import converse_by_turns as converse_by_turns
from rlhf_core.sampling.stop_strings import stop_table as stop_table
from rlhf_core.sampling.stop_strings import token_bytes as token_bytes

__all__ = ["SamplingOptions"]
