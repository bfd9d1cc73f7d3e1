"""Sample completions and conversations: which tokens follow, what ends them, and how devices share the work."""

from rlhf_core.contracts import Rollouts as Rollouts
from rlhf_core.sampling.sampler import SHORTEST_BUCKET as SHORTEST_BUCKET
from rlhf_core.sampling.sampler import ConversationSampler as ConversationSampler
from rlhf_core.sampling.sampler import Sampler as Sampler
from rlhf_core.sampling.sampler import SamplingMesh as SamplingMesh
from rlhf_core.sampling.sampler import SamplingOptions as SamplingOptions
from rlhf_core.sampling.sampler import bucket as bucket
from rlhf_core.sampling.sampler import make_sampler as make_sampler
from rlhf_core.sampling.schedule import converse_by_turns as converse_by_turns

__all__ = ["SamplingOptions"]
