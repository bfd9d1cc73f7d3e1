"""A plugin that needs a library nobody has."""

import no_such_library_for_rlhf  # noqa: F401
