"""What mlx-lm does to the limit of open files as it is imported, foreseen: an error that says what to do, or nothing.

mlx_lm.utils sets the hard limit to 4096. Where it is lower and may not be raised that is a ValueError in the middle of
an import. Called on the loader thread before the first import.
"""

from __future__ import annotations

import resource

from omlxd.engine.api import ModelLoadFailed

MLX_LM_SETS = 4096


def allow_mlx_lm(model: str) -> None:
    """Raises the hard limit to what mlx-lm is going to set, if it is lower. Raises ModelLoadFailed where it cannot."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= MLX_LM_SETS:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, MLX_LM_SETS))
    except ValueError:
        hint = f"raise it with `ulimit -Hn {MLX_LM_SETS}` where the daemon is started, and start it again"
        reason = f"mlx-lm sets the hard limit of open files to {MLX_LM_SETS}, here it is {hard} and cannot be raised"
        raise ModelLoadFailed(model, reason, hint) from None
