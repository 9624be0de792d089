"""The largest tensor that is made in a block, by what the allocator was asked for."""

import torch


class Largest:
    """A block; ``bytes`` are those of its largest allocation, once it has ended.

    A mode would see tensors too, but chains overwrite nothing under one, and so have no chunks.
    """

    def __enter__(self):
        activities = [torch.profiler.ProfilerActivity.CPU]
        self._profile = torch.profiler.profile(activities=activities, profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *error):
        self._profile.__exit__(*error)
        events = self._profile.profiler.kineto_results.events()
        self.bytes = max(event.nbytes() for event in events if event.name() == "[memory]")
