"""The hash of Triton's files, computed in a thread while a model loads.

Triton looks up each compiled kernel by this hash, so it reads its files when the first kernel starts. Those of release
3.7.1 hold 460 MB, which takes 0.3 seconds if they are in the page cache, and 7 seconds from a slow disk.
"""

import contextlib
import importlib
import threading


def hash_triton_early(device_type: str) -> threading.Thread | None:
    """Starts a thread that hashes Triton's files, if the model's device is a GPU and Triton is installed.

    The thread calls `triton_key`, which keeps the hash for this process. It reads and hashes without Python's global
    lock, and ends with the process. If it fails, or is not done at the first kernel, Triton computes the hash itself.

    Args:
        device_type: the `type` of the model's `torch.device`.

    Returns:
        The thread, None if there is nothing to hash.
    """
    if device_type != "cuda":
        return None
    try:
        # imported before the thread starts: imports in two threads can wait for each other
        cache = importlib.import_module("triton.runtime.cache")
    except Exception:  # Triton is missing or does not load: its first kernel says so
        return None

    def compute() -> None:
        with contextlib.suppress(BaseException):  # nobody waits for this thread
            cache.triton_key()

    thread = threading.Thread(target=compute, name="hash of Triton's files", daemon=True)
    thread.start()
    return thread
