"""Hand on the kits of the distribution rlhf-testing, which check a component with one call."""

try:
    from rlhf_testing import *  # noqa: F403
    from rlhf_testing import __all__ as __all__
except ModuleNotFoundError as error:
    if error.name != "rlhf_testing":
        raise
    raise ImportError("rlhf_core.testing needs rlhf-testing; type: pip install rlhf-testing") from error
