"""The processes of one trainer. Rank 0 holds the Temporal worker; the others follow what it does, call by call.

`everywhere(function, *arguments)` runs a function on all ranks at once: what it computes together it computes through
torch.distributed, and each rank puts its own trainer where rank 0 has one among the arguments. With one process it is
a plain call.

Promises: no rank is ever in another call than the others. An error that all ranks see alike (SEEN_ALIKE) is raised on
rank 0 and passed over by the rest; any other ends the process, with which the launcher ends all of them: the supervisor
starts them anew and the activity's retry begins with the committed state. Work is never stopped within a call.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn, TypeVar, TypeVarTuple

import torch
import torch.distributed as dist

from activities.lifetime import launched_rank
from activities.training.work import Work
from workflows.errors import InvalidConfig, TrainerError

log = logging.getLogger(__name__)
Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")
SEEN_ALIKE = (TrainerError, InvalidConfig)
PATIENCE = timedelta(days=30)
"""A follower waits for the next call as long as a run collects."""


class _Own:
    """Stands for a rank's own trainer in what is sent."""


class _Quiet:
    """Stands for Work in what is sent: nobody waits for a follower."""


@cache
def join() -> None:
    """The process group that DeepSpeed needs, once per process: of one without a port or a file, or what the launcher
    says in RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. On the loopback device."""
    import deepspeed
    from deepspeed.utils import logger
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    logger.setLevel(logging.WARNING)
    if dist.is_initialized():
        return
    # The shared-memory operator would be compiled at first use, for a minute, to speed up what one host hardly needs.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("LOCAL_RANK", "0")
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if launched() > 1:
        dist.init_process_group(backend, init_method="env://", timeout=PATIENCE)
    else:
        # The store is this process's memory: no port and no file.
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


def launched() -> int:
    """Processes that our launcher started; 1 without it."""
    return 1 if launched_rank() is None else int(os.environ["WORLD_SIZE"])


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else launched_rank() or 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def everywhere(function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
    """`function(*arguments)` on every rank; rank 0's result. To be called on rank 0 only, of a function that can be
    pickled. Raises what the function raises, if all ranks raise it."""
    if launched() > 1:
        join()
    if world_size() == 1:
        return function(*arguments)
    mine: Any = [item.whole() if isinstance(item, Work) else item for item in arguments]
    try:
        _broadcast((function, list(map(_sent, arguments))))
        try:
            result = function(*mine)
        except SEEN_ALIKE:
            _meet()
            raise
        # Files that the function reads or writes are the caller's again once all ranks are through.
        _meet()
        return result
    except SEEN_ALIKE:
        raise
    except BaseException:
        log.exception("rank 0 is out of step with the others: all ranks end")
        os._exit(1)


def follow() -> NoReturn:
    """Do what rank 0 does, until the launcher ends this process."""
    from activities.training.engine import Trainer

    join()
    own: Any = None
    while True:
        function, arguments = _broadcast(None)
        try:
            result = function(*(_received(item, own) for item in arguments))
        except SEEN_ALIKE as error:
            log.warning("rank %d, with the others: %s", rank(), error)
            result = None
        _meet()
        if _is_trainer(result):
            own = result
        elif function is Trainer.close:
            own = None
            gc.collect()


def gathered(value: Result) -> list[Result]:
    """Every rank's value, in the order of ranks, on every rank."""
    if world_size() == 1:
        return [value]
    found: list[Any] = [None] * world_size()
    dist.all_gather_object(found, value)
    return found


def shares(count: int) -> list[list[int]]:
    """For each rank, which of `count` parts it takes. All ranks take equally many, so that they meet in every
    collective: -1 stands for one that counts nothing."""
    each = -(-count // world_size())
    padded = [*range(count), *[-1] * (each * world_size() - count)]
    return [padded[number :: world_size()] for number in range(world_size())]


def _meet() -> None:
    dist.all_reduce(torch.zeros(1))


def _sent(item: object) -> object:
    return _Own() if _is_trainer(item) else _Quiet() if isinstance(item, Work) else item


def _received(item: object, own: object) -> Any:
    return own if isinstance(item, _Own) else Work() if isinstance(item, _Quiet) else item


def _is_trainer(item: object) -> bool:
    from activities.training.engine import Trainer

    return isinstance(item, Trainer)


def _broadcast(message: object) -> Any:
    box = [message]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]
