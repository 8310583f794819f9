"""The GPUs of this machine that runs may be given, found without starting CUDA."""

import os
import re
import subprocess

_LISTED = re.compile(r"\(UUID: ((?:GPU|MIG)-[^)]+)\)")


def visible_gpus() -> tuple[str, ...]:
    """Returns the GPUs this process may use, as CUDA_VISIBLE_DEVICES names them; none where there is no driver."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        names = [name.strip() for name in given.split(",")]
        # CUDA takes the names up to the first that is none
        stop = next((index for index, name in enumerate(names) if name in ("", "-1", "NoDevFiles")), len(names))
        return tuple(names[:stop])
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    names = _LISTED.findall(listed.stdout)
    parts = [name for name in names if name.startswith("MIG-")]
    return tuple(parts or names)
