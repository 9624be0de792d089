"""Processes that form a gloo group: for one test, or kept for the tests of a session."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import faulthandler
import os
import pathlib
import tempfile
import traceback

import torch
import torch.distributed as dist
from torch import multiprocessing

RANKS = 2
HOW = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
if HOW == "forkserver":  # where torch is imported once; opfuse, which reads the environment, is not
    multiprocessing.set_forkserver_preload(
        ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]
    )


def _as_here(rank, environ, worker, *args):
    """Calls a worker in a process whose environment is the one of who starts it."""
    os.environ.clear()
    os.environ.update(environ)
    return worker(rank, *args)


class Team:
    """Processes of one group that run one function after another.

    Args:
        size: The number of processes.
        seconds: The timeout of their group.
        patience: So many seconds may pass before the first answer, which comes after slow imports.
    """

    def __init__(self, size=RANKS, seconds=30, patience=180):
        self._patience = patience
        self._folder = tempfile.TemporaryDirectory()
        context, given = multiprocessing.get_context(HOW), ({**os.environ}, _serve, size, seconds)
        pairs = [context.Pipe() for _ in range(size)]
        self.pipes = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(
                target=_as_here, args=(rank, *given, self._folder.name, theirs), daemon=True
            )
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pairs:  # so that the end of a process is the end of its pipe
            theirs.close()

    def run(self, worker, *args):
        """What ``worker(rank, *args)`` returned in each process, or its traceback; None: it ended."""
        for pipe in self.pipes:
            pipe.send((worker, args))
        answers = [self._answer(rank) for rank in range(len(self.pipes))]
        self._patience = 60
        return answers

    def _answer(self, rank):
        if not self.pipes[rank].poll(self._patience):
            raise TimeoutError(f"rank {rank} has not answered for {self._patience} seconds")
        try:
            return self.pipes[rank].recv()
        except EOFError:
            return None

    def close(self):
        """Ends the processes."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(2)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


def _serve(rank, size, seconds, folder, pipe):
    faulthandler.enable()
    torch.set_num_threads(1)
    timeout, store = datetime.timedelta(seconds=seconds), pathlib.Path(folder) / "init"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout
    )
    with contextlib.suppress(EOFError, OSError):
        while True:
            worker, args = pipe.recv()
            try:
                torch.manual_seed(0)
                pipe.send((True, worker(rank, *args)))
            except BaseException:
                pipe.send((False, traceback.format_exc()))
    # What compiled or wrapped a model keeps the group, and its threads, alive. One that lets go of a tensor while the
    # interpreter shuts down aborts the process (pytorch/pytorch#179291), so it does not come to that.
    os._exit(0)


_teams = {}


@atexit.register
def _end_all():
    for team in _teams.values():
        team.close()


def together(worker, *args, size=RANKS):
    """Calls ``worker(rank, *args)`` in the processes that are kept for this; returns what they returned.

    After an error they are replaced, since their group may be out of step.
    """
    if size not in _teams:
        _teams[size] = Team(size)
    answers = None
    try:
        answers = _teams[size].run(worker, *args)
    finally:
        if answers is None or not all(answer and answer[0] for answer in answers):
            _teams.pop(size).close()
    return _values(answers)


def apart(worker, *args):
    """As ``together``, in two processes of their own: for a worker that leaves something behind.

    If one ends without an answer, both start again, once. With torch 2.13 the heap of such a process broke once in about 150
    runs, and opfuse has no native code that could break it. A wrong answer is an error and fails at once.
    """
    for _ in range(2):
        with contextlib.closing(Team(seconds=60, patience=390)) as team:
            answers = team.run(worker, *args)
        if None not in answers:
            break
    return _values(answers)


def _values(answers):
    """What a worker returned in each process; it fails if one raised or ended."""
    wrong = [answer[1] if answer else "ended" for answer in answers if not (answer and answer[0])]
    assert not wrong, "\n".join(wrong)
    return [value for _, value in answers]
