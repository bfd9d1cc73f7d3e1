"""Environments: what a policy talks with over several turns, and how the conversation becomes tokens."""

from rlhf_core.environments.calls import EnvironmentCalls as EnvironmentCalls
from rlhf_core.environments.calls import EnvironmentOptions as EnvironmentOptions
from rlhf_core.environments.calls import EpisodeError as EpisodeError
from rlhf_core.environments.calls import call_environment as call_environment
from rlhf_core.environments.calls import checked_messages as checked_messages
from rlhf_core.environments.calls import checked_turn as checked_turn
from rlhf_core.environments.calls import try_episode as try_episode
from rlhf_core.environments.conversation import ConversationEncoder as ConversationEncoder
from rlhf_core.environments.episodes import Episode as Episode
from rlhf_core.environments.episodes import Episodes as Episodes
from rlhf_core.environments.episodes import EpisodeSettings as EpisodeSettings
from rlhf_core.environments.episodes import TurnRecord as TurnRecord
from rlhf_core.environments.parsing import CallParser as CallParser
from rlhf_core.environments.tools import ToolEnvironment as ToolEnvironment
