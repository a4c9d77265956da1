"""Errors say the same in every process."""

import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from kvmem.config import MemoryConfig
from kvmem.errors import CapacityError, ConfigError, ContextLengthError, KvmemError


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("model", Path("m.gguf"), "another"),
        ContextLengthError(5000, 4096, is_least=True),
        CapacityError("no room"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_can_be_pickled(error: KvmemError, protocol: int) -> None:
    error.add_note("while it was read")
    copy = pickle.loads(pickle.dumps(error, protocol))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_a_setting_that_a_worker_refuses_does_not_end_its_pool() -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        with pytest.raises(ConfigError, match="block_tokens is 20") as caught:
            pool.submit(MemoryConfig, block_tokens=20).result()
        assert (caught.value.setting, caught.value.value) == ("block_tokens", 20)
        assert pool.submit(MemoryConfig).result() == MemoryConfig()
