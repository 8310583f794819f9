"""Caches of a user's module, found in the working directory."""

from pathlib import Path

import pytest

MODULE = '''
"""Caches: a full one, one that forgets the first half of its context, and mistakes."""

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


def full(model):
    return DynamicCache(config=model.config)


class Forgetting(DynamicLayer):
    """Forgets the first half of the first tokens that it gets, once they are read."""

    def __init__(self):
        super().__init__()
        self.read = self.forgotten = 0

    def update(self, key_states, value_states, *args, **kwargs):
        first = self.read == 0
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.read += key_states.shape[-2]
        if first:
            self.forgotten = keys.shape[-2] // 2
            self.keys, self.values = (x[:, :, self.forgotten :] for x in (keys, values))
        return keys, values

    def get_seq_length(self):
        return self.read

    def get_mask_sizes(self, query_length):
        return self.read - self.forgotten + query_length, self.forgotten


def forgetting(model):
    cache = DynamicCache(config=model.config)
    cache.layers = [Forgetting() for _ in cache.layers]
    return cache


class Uncounted(Forgetting):
    """Counts only the tokens that it holds."""

    def get_seq_length(self):
        return self.read - self.forgotten


def uncounted(model):
    cache = forgetting(model)
    cache.layers = [Uncounted() for _ in cache.layers]
    return cache


class Restless(DynamicLayer):
    """Returns random values."""

    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(key_states, torch.randn_like(value_states), *args, **kwargs)


def restless(model):
    cache = full(model)
    cache.layers = [Restless() for _ in cache.layers]
    return cache


class Breaking(DynamicLayer):
    """Fails in one method."""

    method = "update"

    def update(self, key_states, value_states, *args, **kwargs):
        if self.method == "update":
            raise KeyError("no update")
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if self.method == 60 and keys.shape[-2] > 60:
            raise RuntimeError("full")
        return keys, values

    def get_seq_length(self):
        if self.method == "get_seq_length":
            raise RuntimeError("no length")
        return super().get_seq_length()

    def get_mask_sizes(self, query_length):
        if self.method == "get_mask_sizes":
            raise AttributeError("no sizes")
        return super().get_mask_sizes(query_length)


def breaking(method):
    def make(model):
        cache = full(model)
        cache.layers = [Breaking() for _ in cache.layers]
        for layer in cache.layers:
            layer.method = method
        return cache

    return make


breaks_update, breaks_length, breaks_sizes = map(breaking, ("update", "get_seq_length", "get_mask_sizes"))
breaks_at_60 = breaking(60)


def nothing(model):
    return None


def fails(model):
    raise RuntimeError("no cache today")
'''


@pytest.fixture
def my_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with caches, in the working directory."""
    (tmp_path / "my_caches.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "my_caches", raising=False)
    return "my_caches"
